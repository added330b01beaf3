"""`dynamic_sample`: groups whose rewards are all equal are left out, and others drawn in their place.

Such a group has no advantage (DAPO, arXiv 2503.14476, section 3.2: dynamic sampling); all it would add is its KL and
entropy terms, and tokens to the normaliser. The step goes on in *rounds* at the same weights: each is a rollout of as
many prompts as groups are lacking, with its units, and one update follows the last round. Gradients are unnormalised
sums, so they are simply added up over rounds and divided once by the normaliser of all kept groups.

Several ranks agree after each round on how many groups all of them lack, and share the prompts of the next one. So they
go through as many rounds, with the prompts that one rank would draw, however unevenly their groups are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rollplex.bundles import Bundle
from rollplex.data.batches import RankRows
from rollplex.data.records import Prompt
from rollplex.rank_step import LockstepStep, Part, RankStep, Share, agree_on_share
from rollplex.ranks import Ranks
from rollplex.step import GRPOStep
from rollplex.totals import StepTotals


@dataclass
class RoundStep(RankStep):
    """A rank's part of one round. Normaliser and update are those of all rounds and ranks."""

    rounds: list[RoundStep] = field(kw_only=True)
    """Of the step so far, this one included; shared by them all."""
    first: int = field(init=False)
    """Groups of all ranks in earlier rounds: this round's numbers go on from there, so that no two responses share a
    seed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.first = sum(earlier.share.groups for earlier in self.rounds)
        self.rounds.append(self)

    def number(self, g: int) -> int:
        return self.first + super().number(g)

    def dropped(self, g: int) -> bool:
        """Whether a scored group is left out: its rewards have no spread."""
        return bool(self.advantages(g).zero_variance_B[0])

    @property
    def num_kept(self) -> int:
        return sum(not self.dropped(g) for g in self.groups)

    def _score(self, g: int) -> None:
        super()._score(g)
        self.groups[g] = replace(self.groups[g], index=self.number(g))

    def _find_kept(self, g: int) -> list[bool]:
        return [False] * self.settings.num_generations if self.dropped(g) else super()._find_kept(g)

    def _train_suffix(self, b: Bundle, update: int) -> None:
        """Of a bundle of which something is kept: what is dropped beside it is masked."""
        if self._left_out(b):
            self.totals.setdefault(update, StepTotals())
        else:
            super()._train_suffix(b, update)

    def _backward(self, b: Bundle, update: int) -> None:
        if self._left_out(b):
            self.prefixes.pop(("act", b.index)).free()
            self.vision.done(b, last=True)
        else:
            super()._backward(b, update)

    def _left_out(self, b: Bundle) -> bool:
        return all(self.dropped(g) for g in b.groups)

    def settle(self, update: int) -> None:
        """Of all rounds, which are over: what holds for one holds for each of them."""
        super().settle(update)
        for part in self.rounds:
            part._agreed = self._agreed

    def _part_of(self, update: int) -> Part:
        own = [super(RoundStep, part)._part_of(update) for part in self.rounds]
        lengths = [n for part in own for n in part.lengths]
        return Part(lengths, sum(lengths), any(part.anything_kept for part in own))


@dataclass
class LockstepRound(RoundStep, LockstepStep):
    """A `RoundStep` that makes the same module calls of the actor on every rank: a bundle is left out where all ranks
    leave theirs out. Beside one that is kept elsewhere, what is dropped is masked."""

    _out: dict[int, bool] = field(default_factory=dict)

    def _left_out(self, b: Bundle) -> bool:
        """A collective when first asked of a bundle."""
        if b.index not in self._out:
            self._out[b.index] = all(self.share.ranks.gather(super()._left_out(b)))
        return self._out[b.index]


class FurtherPrompts:
    """What the rounds of a step draw from: the same prompts in the same order for any number of ranks."""

    def __init__(self, draw: Callable[[int, int], RankRows | None], ranks: Ranks) -> None:
        """draw: (first, count) to this rank's prompts of those rows, without the bad ones; None behind the last row."""
        self._draw, self._ranks = draw, ranks
        self._next = 0

    def take(self, count: int) -> tuple[list[Prompt], Share]:
        """This rank's part of the next `count` good ones, of fewer when there are no more. A collective."""
        prompts: list[Prompt] = []
        places: list[int] = []
        share = Share(self._ranks, (), 0)
        while (lacking := count - share.groups) > 0 and (rows := self._draw(self._next, lacking)) is not None:
            self._next += lacking
            prompts += rows
            places += rows.places
            share = agree_on_share(places, self._ranks)
        return prompts, share


def run_rounds(module: Any, step: GRPOStep) -> list[Any]:
    """Rollout, scoring and the first mini-batch's gradients of a step of a GRPOModule. Returns its rounds.

    A `RoundStep` goes on until all ranks together keep as many groups as the batch has prompts, `max_resample_times`
    rounds were added, or the data module's `further_prompts` end.
    """
    h, colocation = module.hparams, module.colocation

    def run(part: GRPOStep, *, again: bool) -> None:
        colocation.begin(part, again=again)
        requests = partial(part.requests, seed=h["seed"], step=module.rollouts_done)
        colocation.rollout(requests, part.units(0), part.collect)

    run(step, again=False)
    if not isinstance(step, RoundStep):
        return [step]
    ranks = step.share.ranks
    further = FurtherPrompts(partial(module.trainer.datamodule.further_prompts, module.rollouts_done), ranks)
    for _ in range(h["max_resample_times"]):
        kept = sum(ranks.gather(sum(part.num_kept for part in step.rounds)))
        prompts, share = further.take(step.share.groups - kept)
        if not share.groups:
            break
        run(module.new_step(prompts, share, rounds=step.rounds), again=True)
    return step.rounds


def resample_metrics(rounds: list[Any]) -> dict[str, float]:
    """Of a rank's finished step; nothing without `dynamic_sample`."""
    if not isinstance(rounds[0], RoundStep):
        return {}
    kept = sum(part.num_kept for part in rounds)
    groups = sum(len(part.prompts) for part in rounds)
    return {
        "groups_kept": float(kept),
        "groups_dropped": float(groups - kept),
        "groups_resampled": float(groups - len(rounds[0].prompts)),
        "resample_rounds": float(len(rounds) - 1),
        "updates_skipped": float(not rounds[0].anything_kept(0)),
    }
