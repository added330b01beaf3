"""A plain function as a reward, with the arguments that TRL's reward functions take."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rollplex.data.records import Rollout, Sample
from rollplex.rewards.base import Reward
from rollplex.tasks.layout import PROMPT

_OWN = {"prompt", "completion", "completion_ids"}
"""Columns that `**kwargs` does not bring, as with TRL: they are arguments of their own."""
_ALWAYS = ("prompts", "completions", "completion_ids")
"""What TRL gives every function, by name or in `**kwargs`."""
_NONE: Mapping[str, Any] = {}


class FunctionReward(Reward):
    """Calls a function (or any callable), sync or async, with the arguments it names:

    | name | for one response | for a group |
    |---|---|---|
    | `completion` / `completions` | text | list of texts |
    | `completion_ids` | token ids as sampled | list of them |
    | `prompt` / `prompts` | the row's prompt column | list, the same for each |
    | `response` / `responses`, `sample` | `Rollout`, `Sample` | list of `Rollout`, `Sample` |
    | any column of the row | its value | list, the same for each |

    A function with `completions`, `responses` or `prompts` is called once for a group and returns a list, another once
    for each response. With `**kwargs` it gets all columns. One with `**kwargs` that names none of `completion`,
    `response`, `prompt` is called for a group too, and finds prompts, completions and completion_ids there if it does
    not name them. So a reward function written for TRL works as it is, if `completion_format` is what it expects.
    """

    def __init__(
        self,
        function: str | Callable[..., Any],
        completion_format: Literal["text", "messages"] = "text",
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        """
        Args:
            function: module and name, "my_rewards.accuracy", or the function itself.
            completion_format: how a completion is given: as text, or as `[{"role": "assistant", "content": text}]`, as
                TRL does for prompts that are chat messages.
        """
        self.function = _find(function) if isinstance(function, str) else function
        super().__init__(weight, name or getattr(self.function, "__name__", type(self.function).__name__))
        if completion_format not in ("text", "messages"):
            raise ValueError(f"FunctionReward: completion_format={completion_format!r} must be text or messages")
        self.completion_format = completion_format
        parameters = inspect.signature(self.function).parameters.values()
        kinds = inspect.Parameter
        self.open = any(p.kind is kinds.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)]
        self.parameters = {p.name: p.default is kinds.empty for p in named}
        names = set(self.parameters)
        self.grouped = bool({"completions", "responses", "prompts"} & names) or (
            self.open and not {"completion", "response", "prompt"} & names
        )
        if only := [p.name for p in parameters if p.kind is kinds.POSITIONAL_ONLY]:
            raise ValueError(f"FunctionReward: {self.name} takes {only} by position only; arguments are given by name")

    @property
    def by_group(self) -> bool:
        return self.grouped

    @property
    def is_async(self) -> bool:
        return any(map(inspect.iscoroutinefunction, (self.function, type(self.function).__call__)))

    def score(self, sample: Sample, response: Rollout) -> Any:
        known = {
            "completion": self._completion(response), "completion_ids": response.token_ids.tolist(),
            "prompt": _prompt(sample), "response": response, "sample": sample,
        }  # fmt: skip
        return self._call({**sample.columns, **known}, sample.columns)

    def score_group(self, sample: Sample, responses: Sequence[Rollout]) -> Any:
        repeated = {name: [value] * len(responses) for name, value in sample.columns.items()}
        known = {
            "completions": [self._completion(r) for r in responses],
            "completion_ids": [r.token_ids.tolist() for r in responses],
            "prompts": [_prompt(sample)] * len(responses), "responses": list(responses), "sample": sample,
        }  # fmt: skip
        return self._call({**repeated, **known}, repeated, {name: known[name] for name in _ALWAYS})

    def _completion(self, response: Rollout) -> Any:
        return response.text if self.completion_format == "text" else [{"role": "assistant", "content": response.text}]

    def _call(self, known: Mapping[str, Any], columns: Mapping[str, Any], more: Mapping[str, Any] = _NONE) -> Any:
        """known: by name. columns, more: in `**kwargs`."""
        missing = [name for name, required in self.parameters.items() if required and name not in known]
        if missing:
            has = ", ".join(map(str, columns))[:200]
            raise ValueError(f"{self.name} wants {', '.join(missing)}; the row has {has}")
        given = {name: value for name, value in known.items() if name in self.parameters}
        rest = {name: value for name, value in columns.items() if name not in _OWN} if self.open else {}
        return self.function(**{**rest, **(more if self.open else {}), **given})


def _prompt(sample: Sample) -> Any:
    return next((sample.columns[name] for name in PROMPT if sample.columns.get(name) is not None), None)


def _find(path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"FunctionReward: function={path!r} cannot be imported ({error}); give module.name") from error
    if not callable(found):
        raise ValueError(f"FunctionReward: function={path!r} is {type(found).__name__}, not something to call")
    return found
