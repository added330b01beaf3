"""`dynamic_sample`: groups whose rewards are all equal are left out, and others drawn in their place.

Such a group has no advantage (DAPO, arXiv 2503.14476, section 3.2: dynamic sampling); all it would add is its KL and
entropy terms, and tokens to the normaliser. The step goes on in *rounds* at the same weights: each is a rollout of as
many prompts as groups are lacking, with its units, and one update follows the last round. Gradients are unnormalised
sums, so they are simply added up over rounds and divided once by the normaliser of all kept groups.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rollplex.bundles import Bundle
from rollplex.grpo.losses import loss_normalizer
from rollplex.step import GRPOStep
from rollplex.totals import StepTotals


@dataclass
class RoundStep(GRPOStep):
    """One round. Normaliser and update are those of all rounds."""

    rounds: list[RoundStep] = field(kw_only=True)
    """Of the step so far, this one included; shared by them all."""
    first: int = field(init=False)
    """Groups of earlier rounds: this round's numbers go on from there, so that no two responses share a seed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.first = sum(len(earlier.prompts) for earlier in self.rounds)
        self.rounds.append(self)

    def number(self, g: int) -> int:
        return self.first + g

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

    def normalizer(self, update: int) -> float:
        loss = self.settings.loss
        lengths = [n for part in self.rounds for n in part._kept_lengths(range(len(part.prompts)))]
        return loss_normalizer(
            loss.loss_type, lengths, max_completion_length=loss.max_completion_length, batch_tokens=sum(lengths)
        )

    def anything_kept(self, update: int) -> bool:
        return any(super(RoundStep, part).anything_kept(update) for part in self.rounds)


def run_rounds(module: Any, step: GRPOStep) -> list[Any]:
    """Rollout, scoring and the first mini-batch's gradients of a step of a GRPOModule. Returns its rounds.

    A `RoundStep` goes on until as many groups are kept as the batch has prompts, `max_resample_times` rounds were
    added, or the data module's `further_prompts` end.
    """
    h, colocation = module.hparams, module.colocation

    def run(part: GRPOStep, *, again: bool) -> None:
        colocation.begin(part, again=again)
        requests = partial(part.requests, seed=h["seed"], step=module.rollouts_done)
        colocation.rollout(requests, part.units(0), part.collect)

    run(step, again=False)
    if not isinstance(step, RoundStep):
        return [step]
    further = module.trainer.datamodule.further_prompts(module.rollouts_done)
    for _ in range(h["max_resample_times"]):
        lacking = len(step.prompts) - sum(part.num_kept for part in step.rounds)
        prompts = list(itertools.islice(further, lacking))
        if not prompts:
            break
        run(module.new_step(prompts, rounds=step.rounds), again=True)
    return step.rounds


def resample_metrics(rounds: list[Any]) -> dict[str, float]:
    """Of a finished step; nothing without `dynamic_sample`."""
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
