"""One rank's part of a rollout batch: its groups, and what it must know of the others'.

Groups are never split over ranks. The batch of all ranks is the batch that one rank would have: seeds, mini-batches,
normalisers and batch statistics follow a group's place in it.

Where the actor's parameters are sharded (ZeRO-3), each of its module calls is a collective. `LockstepStep` makes every
rank run the same ones: as many bundles, as many passes, the same modules in each. What a rank lacks it makes up with a
filler: a two-token prompt and response whose loss is multiplied by 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rollplex.bundles import Bundle, make_bundles, split_mini_batches
from rollplex.data.records import Prompt, Sample
from rollplex.grpo.advantages import Advantages, group_advantages
from rollplex.grpo.losses import loss_normalizer
from rollplex.models.prefix import PrefixState
from rollplex.models.split_model import SplitModel
from rollplex.models.vision import VisionState
from rollplex.ranks import Ranks
from rollplex.step import PATCHES, GRPOStep
from rollplex.totals import StepTotals
from rollplex.vision import Reader


@dataclass(frozen=True)
class Share:
    """Which groups of a rollout batch this rank has."""

    ranks: Ranks
    numbers: tuple[int, ...]
    """Their places in the batch of all ranks, ascending."""
    groups: int
    """How many groups all ranks have."""


def whole_share(groups: int) -> Share:
    """Of a rank without peers."""
    return Share(Ranks(), tuple(range(groups)), groups)


def agree_on_share(places: Sequence[int], ranks: Ranks) -> Share:
    """places: where this rank's prompts stand among all rows of the batch. Rows that were bad leave no gap."""
    everywhere = sorted(place for there in ranks.gather(list(places)) for place in there)
    number = {place: i for i, place in enumerate(everywhere)}
    assert len(number) == len(everywhere), "two ranks have the same row"
    return Share(ranks, tuple(number[place] for place in places), len(everywhere))


@dataclass(frozen=True)
class Part:
    """What a rank has to say of its groups of one update."""

    lengths: list[int]
    """Tokens of its responses that count, 0 for those that do not."""
    batch_tokens: int
    """In all mini-batches."""
    anything_kept: bool


@dataclass(frozen=True)
class _Agreed:
    """Of one update, over all ranks."""

    normalizer: float
    anything_kept: bool


@dataclass
class RankStep(GRPOStep):
    """A `GRPOStep` whose results are those of the batch of all ranks."""

    share: Share = field(kw_only=True)
    _agreed: dict[int, _Agreed] = field(default_factory=dict)
    _everyone: Advantages | None = None

    def _make_bundles(self) -> list[Bundle]:
        s = self.settings
        return make_bundles(
            [len(p) for p in self.prompts], prompts_per_pass=s.prompts_per_pass, num_mini_batches=s.num_mini_batches,
            numbers=self.share.numbers, groups=self.share.groups,
        )  # fmt: skip

    def number(self, g: int) -> int:
        return self.share.numbers[g]

    @property
    def num_mini_batches(self) -> int:
        return len(split_mini_batches(self.share.groups, self.settings.num_mini_batches))

    # ---- what depends on the groups of other ranks ----

    def settle(self, update: int) -> None:
        """After the units of an update: agree on what its gradient is divided by. A collective."""
        if self.settings.scale_rewards == "batch":
            self._all_advantages()
        if update in self._agreed:
            return
        everywhere = self.share.ranks.gather(self._part_of(update))
        loss = self.settings.loss
        normalizer = loss_normalizer(
            loss.loss_type, [n for there in everywhere for n in there.lengths],
            max_completion_length=loss.max_completion_length,
            batch_tokens=sum(there.batch_tokens for there in everywhere), num_mini_batches=self.num_mini_batches,
        )  # fmt: skip
        self._agreed[update] = _Agreed(normalizer, any(there.anything_kept for there in everywhere))

    def _part_of(self, update: int) -> Part:
        groups = [g for b in self.bundles if b.mini_batch == update % self.num_mini_batches for g in b.groups]
        batch_tokens = sum(self._kept_lengths(range(len(self.prompts))))
        return Part(self._kept_lengths(groups), batch_tokens, super().anything_kept(update))

    def normalizer(self, update: int) -> float:
        return self._agreed[update].normalizer

    def anything_kept(self, update: int) -> bool:
        return self._agreed[update].anything_kept

    def advantages(self, g: int) -> Advantages:
        return self._all_advantages() if self.settings.scale_rewards == "batch" else super().advantages(g)

    def _row(self, g: int) -> int:
        return self.number(g) if self.settings.scale_rewards == "batch" else 0

    def _all_advantages(self) -> Advantages:
        """Of the groups of all ranks, in the batch's order. A collective when first asked."""
        if self._everyone is None:
            mine = {self.number(g): group.rewards for g, group in self.groups.items()}
            everyone = {n: rewards for there in self.share.ranks.gather(mine) for n, rewards in there.items()}
            rewards_BG = torch.stack([everyone[n] for n in sorted(everyone)])
            self._everyone = group_advantages(rewards_BG, scale_rewards="batch")
        return self._everyone


@dataclass
class LockstepStep(RankStep):
    """A `RankStep` that makes the same module calls of the actor on every rank."""

    def _make_bundles(self) -> list[Bundle]:
        """Every mini-batch gets as many bundles as the rank with most of them has."""
        own = super()._make_bundles()
        mine = [
            [sorted(_media_of([self.prompts[g] for g in b.groups])) for b in own if b.mini_batch == m]
            for m in range(self.num_mini_batches)
        ]
        everywhere = self.share.ranks.gather(mine)
        bundles: list[Bundle] = []
        for m in range(self.num_mini_batches):
            part = [b for b in own if b.mini_batch == m]
            for i in range(max(len(there[m]) for there in everywhere)):
                bundle = part[i] if i < len(part) else Bundle(0, (), m)
                bundles.append(replace(bundle, index=len(bundles)))
                self.media[len(bundles) - 1] = frozenset(
                    name for there in everywhere if i < len(there[m]) for name in there[m][i]
                )
        return bundles

    def _prompts_of(self, b: Bundle) -> list[Prompt]:
        return super()._prompts_of(b) or [filler(self.actor)]

    def _compute_prefix(
        self, b: Bundle, name: Reader, model: SplitModel, prompts: Sequence[Prompt], vision: VisionState | None
    ) -> PrefixState:
        if name == "ref":  # whole on every rank
            return super()._compute_prefix(b, name, model, prompts, vision)
        media = self.media[b.index] if vision is None else None
        return model.prefix(prompts or [filler(model)], grad=name == "act", media=media, vision=vision)

    def _pad(self, rows: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """At least two tokens wide: with one, the text model would have nothing to compute."""
        ids_NR, lengths_N = super()._pad(rows)
        return torch.nn.functional.pad(ids_NR, (0, max(0, 2 - ids_NR.shape[1]))), lengths_N

    def _train_suffix(self, b: Bundle, update: int) -> None:
        if b.groups:
            super()._train_suffix(b, update)
            return
        self.totals.setdefault(update, StepTotals())
        if self.settings.scale_rewards == "batch":
            self._all_advantages()  # where the first loss of the other ranks asks for them
        for rows in self._passes(b):
            prefix = self._prefix_of(b, "act", self.actor, rows)
            self._filler_loss(prefix, grad=True).backward()
            if not self.settings.share_prefix:
                prefix.backward()

    def _score_suffix(self, b: Bundle, name: Reader, model: SplitModel) -> None:
        if b.groups:
            super()._score_suffix(b, name, model)
            return
        for rows in self._passes(b):
            prefix = self._prefix_of(b, name, model, rows)
            self._filler_loss(prefix, grad=False)
        self.prefixes.pop((name, b.index), prefix).free()

    def _filler_loss(self, prefix: PrefixState, *, grad: bool) -> Tensor:
        ids_12 = filler(self.actor).input_ids[None]
        out = self.actor.suffix(
            prefix, ids_12, torch.tensor([2]), temperature=self.settings.sampling.temperature, grad=grad
        )
        return out.logps_NR.sum() * 0.0


def filler(model: SplitModel) -> Prompt:
    """A prompt of two ordinary tokens."""
    token = next(t for t in range(len(model.banned_token_ids) + 1) if t not in model.banned_token_ids)
    ids = torch.full((2,), token)
    return Prompt(Sample("filler"), ids, torch.zeros_like(ids))


def _media_of(prompts: Sequence[Prompt]) -> set[str]:
    return {name for p in prompts for name in PATCHES if name in p.media}
