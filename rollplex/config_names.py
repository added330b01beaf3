"""Misspelt names on the command line of a run, found before the parser, whose own answer is a page.

Only what certainly does not exist is refused here; whatever cannot be judged is left to the parser.
"""

from __future__ import annotations

import inspect
import os
import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rollplex.planner.names import ENTRY, check_arguments, check_sections, check_strategy, check_trainer, class_at
from rollplex.planner.reading import read_yaml

BESIDE = (
    "config", "verbose", "return_predictions", "steps", "tolerance", "cases", "engine_parity", "engine_tolerance",
    "batch_size", "json",
)  # fmt: skip
"""Settings of subcommands, beside the sections."""
_FLAG = re.compile(r"--?([A-Za-z_][\w.]*)\+?")
"""A value may begin with dashes too: -0.5 is one, and so is a text with spaces."""


def check_command(arguments: Sequence[str], *, closed: bool = True) -> None:
    """ValueError for a section, a class or a setting that does not exist, in the configs or the dotted overrides.

    arguments: those behind the subcommand. closed: whether there are no sections but ours; a user's CLI may add some.
    """
    content: dict[str, Any] = {}
    flags = list(_flags(arguments))
    for path in (value for name, value in flags if name in ("config", "c")):
        content = _merged(content, _read(path))
    dotted = [(name.split("."), value) for name, value in flags if "." in name]
    for parts, value in [([name], value) for name, value in flags if name in ("model", "data")] + dotted:
        _choose(content, parts, value)
    if closed:
        check_sections({str(name).rstrip("+"): 0 for name in (*content, *(parts[0] for parts, _ in dotted))}, BESIDE)
    _check_content(content)
    for parts, value in dotted:
        _check_flag(content, parts, value)


def _flags(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name without dashes and the + of lists, value or "") of each flag."""
    for at, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if found := _FLAG.fullmatch(flag):
            following = arguments[at + 1] if at + 1 < len(arguments) else ""
            yield found[1], value if equals or _FLAG.fullmatch(following.partition("=")[0]) else following


def _read(path: str) -> dict[str, Any]:
    if not _is_file(path):
        if Path(path).suffix in (".yaml", ".yml", ".json") and not re.search(r"://|:\s|\n", path):
            raise ValueError(f"--config {path}: there is no such file (looked from {os.getcwd()})")
        return {}  # the parser takes more: a config's text, an address
    content = read_yaml(path)
    return content if isinstance(content, dict) else {}


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:  # too long for a name: a config's text
        return False


def _merged(below: Any, above: Any) -> Any:
    """Two configs, the second on top; another class_path brings its own settings."""
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    if below.get("class_path") != above.get("class_path", below.get("class_path")):
        return above
    return {**below, **{name: _merged(below.get(name), value) for name, value in above.items()}}


def _choose(content: dict[str, Any], parts: list[str], value: str) -> None:
    """Enter a class that a flag names, such as --data.task mine.Task, so that it is the one that is looked at. What
    the flag gives instead may be a file or text that has one; of anything else nothing is known."""
    if parts[-1] == "class_path":
        parts = parts[:-1]
    here: Any = content
    for part in parts[:-1]:
        here = _inside(here, part)
    found = here.get("init_args") if isinstance(here, dict) and isinstance(here.get("init_args"), dict) else here
    if not isinstance(found, dict):
        return
    old = found.get(parts[-1])
    if (isinstance(old, dict) and "class_path" in old) or (len(parts) == 1 and "." in value):
        found[parts[-1]] = _merged(old, _entry(value))


def _entry(value: str) -> Any:
    """What a flag gives an entry: the content of a file, a class_path, or the content of text."""
    if _is_file(value):
        return read_yaml(value)
    if all(piece.isidentifier() for piece in value.split(".")):
        return {"class_path": value}
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return None


def _inside(entry: Any, name: str) -> Any:
    """A setting of a section or of an entry: init_args may be left out on the command line."""
    if not isinstance(entry, dict):
        return None
    arguments = entry.get("init_args")
    return arguments if name == "init_args" else entry.get(name, (arguments or {}).get(name))


def _check_content(content: Mapping[str, Any]) -> None:
    trainer = content.get("trainer")
    if isinstance(trainer, Mapping):
        check_trainer(str(name).rstrip("+") for name in trainer)
        strategy = trainer.get("strategy")
        if isinstance(strategy, str) and "." not in strategy:
            check_strategy(strategy)
    for name, value in content.items():
        _check_inside(str(name), value)


def _check_inside(where: str, value: Any) -> None:
    if isinstance(value, list):
        for inner in value:
            _check_inside(where, inner)
    elif isinstance(value, Mapping):
        path, arguments = value.get("class_path"), value.get("init_args")
        kind = _class(where, path) if isinstance(path, str) else None
        if kind is not None and isinstance(arguments, Mapping):
            check_arguments(where, kind, (str(name).rstrip("+") for name in arguments))
        for name, inner in value.items():
            _check_inside(where if name == "init_args" else f"{where}.{name}", inner)


def _class(where: str, path: str) -> type | None:
    """None for what is no class, or takes settings that its signature does not tell."""
    try:
        found = pkgutil.resolve_name(path) if "." in path else class_at(where, path)
    except Exception:
        # The parser finds classes without dots that are imported somewhere.
        found = class_at(where, path) if "." in path else None
    if not isinstance(found, type):
        return None
    ours = found.__module__.partition(".")[0] == "rollplex"
    try:
        parameters = inspect.signature(found.__init__).parameters.values()  # type: ignore[misc]
    except (TypeError, ValueError):
        return None
    return found if ours or not any(p.kind is p.VAR_KEYWORD for p in parameters) else None


def _check_flag(content: Mapping[str, Any], parts: list[str], value: str) -> None:
    section, name, *more = parts
    if section == "trainer":
        check_trainer([name])
        if name == "strategy" and not more and value.isidentifier() and value != "null":
            check_strategy(value)
        if more:
            _check_setting(f"trainer.{name}", (content.get("trainer") or {}).get(name), more)
    elif section in ("model", "data"):
        _check_setting(section, content.get(section), [name, *more])


def _check_setting(where: str, entry: Any, names: list[str]) -> None:
    """Of an entry with a class_path: a setting of it, or of an entry inside it."""
    names = names[1:] if names[0] == "init_args" else names
    path = entry.get("class_path") if isinstance(entry, Mapping) else None
    if not names or names[0] in ENTRY or names[0] == "help" or not isinstance(path, str):
        return
    kind = _class(where, path)
    if kind is not None:
        check_arguments(where, kind, names[:1])
    if names[1:]:
        _check_setting(f"{where}.{names[0]}", _inside(entry, names[0]), names[1:])
