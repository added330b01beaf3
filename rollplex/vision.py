"""One vision pass for engine, actor and reference: who may read the features of a rollout batch, and for how long.

Features are computed before the rollout, because the engine waits for them. They are read by the prefix passes of
every model with the same tower until an update changes it, or for the whole step where the tower is frozen. The actor
also needs the tower's graph, unless the tower is frozen; without it (the budget had no room) or when they are out of
date, its pass runs the tower itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import nn

from rollplex.bundles import Bundle
from rollplex.checks import check_vision
from rollplex.data.records import Prompt
from rollplex.engines.base import RolloutEngine
from rollplex.models.split_model import SplitModel
from rollplex.models.vision import VisionState
from rollplex.step_settings import StepSettings
from rollplex.units import UnitId, UnitKind

Reader = Literal["act", "old", "ref", "engine"]
Gathered = Callable[[Sequence[nn.Parameter]], AbstractContextManager[object]]


def vision_settings(
    engine: RolloutEngine, actor: SplitModel, reference: SplitModel | None, *, share_prefix: bool,
    sharded: bool = False, gathered: Gathered = lambda parameters: nullcontext(),
) -> dict[str, bool]:  # fmt: skip
    """The vision settings of a run's steps (`StepSettings`), once weights and gradients are as the run trains them.

    sharded: trainers or engines are of several ranks. gathered: a scope in which parameters of the actor are whole; a
    collective where they are cut (ZeRO-3).
    """
    check_vision(engine.takes_vision, sharded)
    if engine.takes_vision and not share_prefix:
        warnings.warn(
            "the engine's vision=shared has no effect on the trainer with share_prefix=false, which runs the vision "
            "tower for each response; set share_prefix=true, or vision=engine",
            stacklevel=2,
        )
    share = engine.takes_vision and share_prefix
    return {
        "share_vision": share,
        "share_vision_with_reference": share and reference is not None and same_tower(actor, reference, gathered),
    }


def same_tower(a: SplitModel, b: SplitModel, gathered: Gathered = lambda parameters: nullcontext()) -> bool:
    """Whether two models make the same features of a picture, now and later: nothing of either tower is trained, and
    all their weights are equal. gathered: a scope in which parameters of `a` are whole."""
    if not (a.vision_frozen and b.vision_frozen):
        return False
    ours, theirs = a.vision_parameters, b.vision_parameters
    if len(ours) != len(theirs):
        return False
    equal = True
    for mine, other in zip(ours, theirs, strict=True):
        with gathered([mine]):
            equal &= torch.equal(mine, other)
    return equal


class VisionPasses:
    """Of one step: the features that are held, and how often a tower ran."""

    def __init__(
        self, actor: SplitModel, prompts: Sequence[Prompt], settings: StepSettings,
        media: Mapping[int, frozenset[str]] | None = None,
    ) -> None:  # fmt: skip
        """media: of ranks that make the same module calls, by bundle: pixel tensors that some rank has there."""
        self._media = media or {}
        self._actor = actor
        self._prompts = prompts
        self._settings = settings
        self._states: dict[int, VisionState] = {}
        self.passes = 0
        """Prompts with pictures or videos that a tower was run for, each time."""

    @property
    def held(self) -> list[VisionState]:
        """The features there are."""
        return list(self._states.values())

    def seen(self, groups: Sequence[int]) -> int:
        """How many of these prompts have pictures or videos."""
        return sum(bool(self._prompts[g].media) for g in groups)

    def ran(self, groups: Sequence[int]) -> None:
        """A tower was run for these prompts."""
        self.passes += self.seen(groups)

    @property
    def per_prompt(self) -> float:
        """Passes of any tower per prompt that has something to see."""
        return self.passes / max(self.seen(range(len(self._prompts))), 1)

    def shared(self, b: Bundle) -> bool:
        """Whether the engine is handed features of this bundle, on this rank or another."""
        return self._settings.share_vision and (self.seen(b.groups) > 0 or bool(self._media.get(b.index)))

    def needs(self, b: Bundle) -> list[UnitId]:
        """The unit that makes the bundle's features, of a pass that may read them."""
        return [(UnitKind.VISION, b.index)] if self.shared(b) else []

    def compute(self, b: Bundle, *, graph: bool) -> None:
        """Run the actor's tower, for everyone. graph: keep what its backward needs; False where the features are there
        already lets go of it."""
        if b.index in self._states:
            if not graph:
                self._states[b.index].drop_graph()
            return
        # Later mini-batches train after an update, which puts the graph out of date.
        graph = graph and b.mini_batch == 0
        prompts = [self._prompts[g] for g in b.groups]
        self._states[b.index] = self._actor.vision(prompts, grad=graph, media=self._media.get(b.index))
        self.ran(b.groups)

    def of(self, b: Bundle, reader: Reader) -> VisionState | None:
        """The features that a pass may read instead of running the tower, if any."""
        state = self._states.get(b.index)
        if state is None or (reader == "ref" and not self._settings.share_vision_with_reference):
            return None
        if not state.holds_for(self._actor.version):
            self._states.pop(b.index).free()
            return None
        return state if reader != "act" or state.has_graph or state.frozen else None

    def runs_tower(self, b: Bundle) -> bool:
        """Whether the actor's next prefix pass runs the tower although features are shared."""
        return self.shared(b) and self.of(b, "act") is None

    def done(self, b: Bundle, *, last: bool) -> None:
        """A pass of the actor over this bundle is over, and so is its rollout. Free what nobody will read again.

        last: none is to follow.
        """
        state = self._states.get(b.index)
        if state is not None and (last or not state.frozen):
            self._states.pop(b.index).free()

    @property
    def held_bytes(self) -> int:
        """Bytes of features and of what waits for the tower's backward, on the device."""
        return sum(s.nbytes + s.saved_bytes for s in self._states.values())

    @property
    def host_bytes(self) -> int:
        return sum(s.host_bytes for s in self._states.values())
