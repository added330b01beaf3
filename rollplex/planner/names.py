"""Names in a config that do not exist: sections, classes, and settings that a class lacks; each with the nearest name.

A plan would pass over them, and a run says them at the end of a page. Classes are imported, never built: a constructor
may read files.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterable, Mapping
from importlib import import_module
from typing import Any

SEARCHED = (
    "rollplex", "rollplex.engines", "rollplex.callbacks", "rollplex.rewards", "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers", "lightning.pytorch.strategies",
)  # fmt: skip
"""Where a class_path without dots is looked for, as a run finds subclasses by their name."""
ENTRY = {"class_path", "init_args", "dict_kwargs"}
STRATEGIES = ("auto", "rollplex", "rollplex_ddp", "rollplex_zero1", "rollplex_zero2", "rollplex_zero3")
"""Besides Lightning's."""
SECTIONS = ("seed_everything", "trainer", "model", "data", "optimizer", "lr_scheduler", "ckpt_path", "weights_only")
"""Of a config of `rollplex fit`."""


def check_names(content: Mapping[str, Any]) -> None:
    """ValueError for a class or a setting of the config's sections that does not exist."""
    check_sections(content)
    trainer = dict(content.get("trainer") or {})
    check_trainer(trainer)
    strategy = trainer.get("strategy")
    if isinstance(strategy, str) and "." not in strategy:
        check_strategy(strategy)
    elif strategy is not None:
        _check_entry("trainer.strategy", strategy)
    engine = ((strategy.get("init_args") or {}) if isinstance(strategy, Mapping) else {}).get("engine")
    if engine is not None:
        _check_entry("engine", engine)
    callbacks = trainer.get("callbacks") or []
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        _check_entry("trainer.callbacks", callback)
    for section in ("model", "data"):
        if content.get(section) is not None:
            _check_entry(section, content[section])


def check_sections(given: Iterable[str], also: Iterable[str] = ()) -> None:
    """ValueError for a section that a config has not. also: names that may stand beside them."""
    if wrong := _unknown(given, (*SECTIONS, *also)):
        raise ValueError(f"the config has no section {wrong}; there are {', '.join(SECTIONS)}")


def class_at(where: str, path: str) -> type:
    """The class of a class_path; ValueError where there is none, or where it cannot be imported."""
    module, _, name = path.rpartition(".")
    for folder in (module,) if module else SEARCHED:
        try:
            found = getattr(import_module(folder), name, None)
        except Exception as error:  # a user's module may raise anything
            raise ValueError(f"{where}: {path} cannot be imported ({type(error).__name__}: {error})") from error
        if isinstance(found, type):
            return found
    known = [name for name, value in vars(import_module(module)).items() if isinstance(value, type)] if module else []
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {module}.{near[0]}?" if near else "write its class_path as module.Class"
    raise ValueError(f"{where}: there is no class {path}; {hint}")


def check_trainer(trainer: Iterable[str]) -> None:
    """ValueError for a setting that the Trainer has not."""
    from lightning.pytorch import Trainer

    if wrong := _unknown(trainer, inspect.signature(Trainer.__init__).parameters):
        raise ValueError(f"trainer has no setting {wrong}; take it out, or correct its name")


def check_strategy(name: str) -> None:
    """ValueError for a strategy that has no such name, neither here nor in Lightning."""
    from lightning.pytorch.strategies import StrategyRegistry

    if name not in STRATEGIES and name not in StrategyRegistry:
        try:
            class_at("trainer.strategy", name)
        except ValueError:
            near = difflib.get_close_matches(name, STRATEGIES, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            names = ", ".join(STRATEGIES[1:])
            raise ValueError(f"trainer.strategy={name!r} is unknown; {hint}set one of {names}") from None


def _check_entry(where: str, entry: Any) -> None:
    """A class_path with its init_args, and those inside them."""
    path = entry.get("class_path") if isinstance(entry, Mapping) else entry
    if not isinstance(path, str) or not path:
        raise ValueError(f"{where}={entry!r} must be a class_path, or a mapping of class_path and init_args")
    if not isinstance(entry, Mapping):
        class_at(where, path)
        return
    if wrong := _unknown(entry, ENTRY):
        raise ValueError(f"{where}: {wrong} beside class_path; settings of {path} go into init_args")
    found = class_at(where, path)
    arguments = entry.get("init_args") or {}
    if not isinstance(arguments, Mapping):
        raise ValueError(f"init_args={arguments!r} of {found.__name__} must be a mapping")
    check_arguments(where, found, arguments)
    _check_inside(where, arguments)


def check_arguments(where: str, kind: type, arguments: Iterable[str]) -> None:
    """ValueError for settings that a class does not take."""
    known = settings_of_class(kind)
    if known is not None and (wrong := _unknown(arguments, known)):
        there = "" if wrong.endswith("?)") else f"; there are {', '.join(known)}"
        raise ValueError(f"{where}: {kind.__name__} has no setting {wrong}{there}")


def _unknown(given: Iterable[Any], known: Collection[str]) -> str:
    """Names that are not known, each with the nearest that is; "" where all are."""
    found = []
    for name in map(str, given):
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            found.append(f"{name} (did you mean {near[0]}?)" if near else name)
    return ", ".join(found)


def _check_inside(where: str, value: Any) -> None:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if isinstance(inner, Mapping) and "class_path" in inner:
                _check_entry(f"{where}.{name}", inner)
            else:
                _check_inside(f"{where}.{name}", inner)
    elif isinstance(value, list):
        for inner in value:
            if isinstance(inner, Mapping) and "class_path" in inner:
                _check_entry(where, inner)


def settings_of_class(kind: type) -> list[str] | None:
    """Names that the constructor takes, those that it hands on to its parents' too; None where it takes any."""
    names: list[str] = []
    for parent in kind.__mro__:
        if "__init__" not in vars(parent):
            continue
        parameters = list(inspect.signature(vars(parent)["__init__"]).parameters.values())[1:]
        if parent is object:
            break
        named = (p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
        names += [p.name for p in named if p.name not in names]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return names
    return None if names else []
