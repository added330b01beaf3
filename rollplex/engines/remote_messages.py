"""What trainer and engine process tell each other. Commands are (name, arguments); the rest is here."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollplex.data.records import PrefixPass, Prompt, Request, Rollout, Sample
from rollplex.engines.base import RolloutEngine, WindowState
from rollplex.engines.remote_weights import ModelSpec


@dataclass(frozen=True)
class EngineState:
    """What a `RolloutEngine` says of itself between two steps."""

    window: WindowState = WindowState.IDLE
    num_running: int = 0
    progress: int = 0


@dataclass(frozen=True)
class Update:
    """After one engine step."""

    finished: tuple[Rollout, ...]
    state: EngineState


@dataclass(frozen=True)
class Reply:
    """To one command, in order."""

    value: Any
    state: EngineState


@dataclass(frozen=True)
class Refused:
    """A command or a step raised. `error` is None where it could not be pickled."""

    error: Exception | None
    text: str
    """Its traceback."""
    state: EngineState


@dataclass(frozen=True)
class Start:
    """What a server is told before it builds the engine."""

    engine: RolloutEngine
    """Not started: settings only."""
    model: ModelSpec
    processor: Any
    bucket_bytes: int
    timeout: float
    store: str | None
    """File in which trainer and engine ranks find each other for the weights; None: the server opens a port."""
    over_nccl: bool

    @property
    def ranks(self) -> int:
        """Of the engine: as many processes, on the server's machine."""
        return getattr(self.engine, "tensor_parallel_size", 1)


@dataclass(frozen=True)
class Join:
    """What a further rank of an engine is told by its first one."""

    start: Start
    rank: int
    port: int | None
    """Of the store, where it is no file."""
    host: str
    """Where all ranks and the trainer reach each other."""
    meeting: str
    """File in which the ranks find each other."""


def versions() -> dict[str, str]:
    """Of what both sides must have alike: the messages are pickles of these packages' classes."""
    return {name: importlib.metadata.version(name) for name in ("rollplex", "transformers")}


def check_versions(here: Mapping[str, str], there: Mapping[str, str]) -> None:
    """ValueError unless trainer (`there`) and engine server (`here`) have the same."""
    for name, version in here.items():
        if there.get(name) != version:
            raise ValueError(
                f"the engine server has {name} {version} and the trainer {there.get(name)}: install the same on both "
                "sides, or the engine would build another model"
            )


def slim(requests: Sequence[Request]) -> list[Request]:
    """What an engine reads of them: without columns, pictures, and states of the trainer's. Prompts and passes that
    were one stay one."""
    prompts: dict[int, Prompt] = {}
    passes: dict[int, PrefixPass] = {}
    for r in requests:
        if id(r.prompt) not in prompts:
            prompts[id(r.prompt)] = replace(
                r.prompt, sample=Sample(r.prompt.sample.id), media=dict(r.prompt.media), images=(), text=""
            )
        if r.prefix is not None and id(r.prefix) not in passes:
            passes[id(r.prefix)] = replace(r.prefix, state=None, vision=None)
    return [
        replace(r, prompt=prompts[id(r.prompt)], prefix=None if r.prefix is None else passes[id(r.prefix)])
        for r in requests
    ]
