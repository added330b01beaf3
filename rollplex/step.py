"""One step of GRPO as work units: what each unit computes, and the state that crosses between them.

The step knows nothing of when its units run (`schedule.py` does). Losses are accumulated as unnormalised sums; the
normaliser, known once all responses are, divides the gradients before the optimizer step.

Shape legend: B prompts of the rollout batch, G responses per prompt, b prompts of a bundle, N = b*g rows of a suffix
pass (g responses of each prompt), R response tokens (padded).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollplex.bundles import Bundle, make_bundles
from rollplex.data.records import Group, PrefixPass, Prompt, Request, Rollout
from rollplex.grpo.advantages import Advantages, group_advantages
from rollplex.grpo.importance import importance_weights, mismatch_stats
from rollplex.grpo.losses import kept_responses, loss_normalizer, policy_loss_sums
from rollplex.models.prefix import PrefixState
from rollplex.models.split_model import SplitModel
from rollplex.models.vision import VisionState
from rollplex.response_rows import ResponseRows
from rollplex.rewards.runner import RewardFailure, RewardRunner
from rollplex.seeds import request_seed
from rollplex.step_settings import StepSettings
from rollplex.totals import StepTotals
from rollplex.units import PREFIX_KINDS, Unit, UnitId, UnitKind
from rollplex.vision import Reader, VisionPasses

PATCHES = ("pixel_values", "pixel_values_videos")
"""Media tensors with one row per vision patch."""


@dataclass
class GRPOStep(ResponseRows):
    """State of one rollout batch from its prompts to its last update."""

    actor: SplitModel
    reference: SplitModel | None
    rewards: RewardRunner
    prompts: Sequence[Prompt]
    settings: StepSettings

    bundles: list[Bundle] = field(init=False)
    rollouts: list[list[Rollout | None]] = field(init=False)
    vision: VisionPasses = field(init=False)
    media: dict[int, frozenset[str]] = field(default_factory=dict)
    """Of ranks that make the same module calls, by bundle: pixel tensors that a prompt of it has on some rank."""
    groups: dict[int, Group] = field(default_factory=dict)
    prefix_bytes_peak: int = 0
    """Most bytes of prefix state held at once on the device."""
    prefix_host_bytes_peak: int = 0
    suffix_bytes: int = 0
    """What autograd saved for the backward of the suffix pass that runs now."""
    at_peak: Callable[[], None] = lambda: None
    """Called inside a suffix unit when it holds most, before its backward."""
    prefixes_recomputed: int = 0
    """Prompts that the actor computed again after the first update: the rollout's weights were out of date."""
    failures: list[RewardFailure] = field(default_factory=list)
    totals: dict[int, StepTotals] = field(default_factory=dict)
    _advantages: dict[int, Advantages] = field(default_factory=dict)
    prefixes: dict[tuple[str, int], PrefixState] = field(default_factory=dict)
    """Alive now, by model ("act", "ref", "old") and bundle."""
    _logps: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    _kept: dict[int, list[bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bundles = self._make_bundles()
        self.vision = VisionPasses(self.actor, self.prompts, self.settings, self.media)
        self._version = self.actor.version
        self.rollouts = [[None] * self.settings.num_generations for _ in self.prompts]

    def _make_bundles(self) -> list[Bundle]:
        s = self.settings
        lengths = [len(p) for p in self.prompts]
        return make_bundles(lengths, prompts_per_pass=s.prompts_per_pass, num_mini_batches=s.num_mini_batches)

    def number(self, g: int) -> int:
        """A group's place in the rollout batch of all ranks."""
        return g

    # ---- rollout ----

    def requests(self, *, seed: int, step: int) -> list[Request]:
        """With the prefixes that have been computed by now."""
        passes = {g: prefix for prefix in map(self._prefix_pass, self.bundles) for g in prefix.groups}
        return [
            Request(g, i, prompt, self.settings.sampling, request_seed(seed, step, self.number(g), i), passes[g])
            for g, prompt in enumerate(self.prompts)
            for i in range(self.settings.num_generations)
        ]

    def _prefix_pass(self, b: Bundle) -> PrefixPass:
        states = [self.prefixes.get((name, b.index)) for name in ("act", "old")]
        state = next((s for s in states if s is not None), None)
        vision = self.vision.of(b, "engine") if state is None else None
        if state is None and vision is None:
            self.vision.ran(b.groups)  # it will be, by the engine
        return PrefixPass(b.index, b.groups, state, vision)

    @property
    def tokens(self) -> int:
        """Response tokens so far."""
        return sum(len(r) for row in self.rollouts for r in row if r is not None)

    def collect(self, rollout: Rollout) -> int | None:
        """Keep a finished response; the group's index when it is complete."""
        assert rollout.weights_version == self.actor.version, (
            f"response sampled with weights version {rollout.weights_version}, the trainer is at {self.actor.version}"
        )
        assert len(rollout.logps) == len(rollout), (
            f"response {rollout.key}: {len(rollout.logps)} log-probs for {len(rollout)} ids"
        )
        assert bool(torch.isfinite(rollout.logps).all()), f"response {rollout.key} has a log-prob that is not finite"
        row = self.rollouts[rollout.group]
        assert row[rollout.index] is None, f"response {rollout.key} came twice"
        row[rollout.index] = rollout
        return rollout.group if all(r is not None for r in row) else None

    # ---- the graph of units ----

    @property
    def num_mini_batches(self) -> int:
        return 1 + max(b.mini_batch for b in self.bundles)

    @property
    def num_updates(self) -> int:
        return self.settings.num_iterations * self.num_mini_batches

    def units(self, update: int) -> list[Unit]:
        """Units of one update. Update 0 also brings rewards and everything scored at the rollout's weights."""
        mini_batch = update % self.num_mini_batches
        units = self._scoring_units() if update == 0 else []
        for bundle in self.bundles:
            if bundle.mini_batch == mini_batch:
                units += self._actor_units(bundle, update)
        return units

    def _scoring_units(self) -> list[Unit]:
        units = [Unit(UnitKind.REWARD, g, partial(self._score, g), (g,)) for g in range(len(self.prompts))]
        for b in self.bundles:
            if self.vision.shared(b):
                run, lean = (partial(self._vision, b, graph=graph) for graph in (True, False))
                units.append(self._unit(UnitKind.VISION, b, run, lean=lean))
            if self.reference is not None and b.groups:
                units += self._no_grad_units(b, "ref", self.reference, UnitKind.REF_PREFIX, UnitKind.REF_SUFFIX)
            if b.mini_batch > 0:  # the first mini-batch's own log-probs are those of the rollout's weights
                units += self._no_grad_units(b, "old", self.actor, UnitKind.OLD_PREFIX, UnitKind.OLD_SUFFIX)
        return units

    def _no_grad_units(
        self, b: Bundle, name: Reader, model: SplitModel, first: UnitKind, second: UnitKind
    ) -> list[Unit]:
        units = [self._unit(first, b, lambda: self._prefix(b, name, model), needs=self.vision.needs(b))]
        units += [self._unit(second, b, lambda: self._score_suffix(b, name, model), needs=[(first, b.index)])]
        return units if self.settings.share_prefix else [self._unit(second, b, units[1].run)]

    def _actor_units(self, b: Bundle, update: int) -> list[Unit]:
        prefix, suffix, backward = UnitKind.ACT_PREFIX, UnitKind.ACT_SUFFIX, UnitKind.ACT_BACKWARD
        needs: list[UnitId] = [(prefix, b.index)]
        if update == 0:
            scored = range(len(self.prompts)) if self.settings.scale_rewards == "batch" else b.groups
            needs += [(UnitKind.REWARD, g) for g in scored]
            needs += [(UnitKind.REF_SUFFIX, b.index)] if self.reference is not None and b.groups else []
        if not self.settings.share_prefix:
            return [self._unit(suffix, b, lambda: self._train_suffix(b, update), needs=needs[1:])]
        first, tower = self.vision.needs(b) if update == 0 else [], partial(self.vision.runs_tower, b)
        return [
            self._unit(prefix, b, lambda: self._prefix(b, "act", self.actor), needs=first, runs_tower=tower),
            self._unit(suffix, b, lambda: self._train_suffix(b, update), needs=needs),
            self._unit(backward, b, lambda: self._backward(b, update), needs=[(suffix, b.index)]),
        ]

    def _unit(
        self, kind: UnitKind, b: Bundle, run: Callable[[], None], *, needs: Sequence[UnitId] = (), **more: Any
    ) -> Unit:
        prompts = self._prompts_of(b)
        tokens = sum(len(p) for p in prompts)
        patches = sum(int(p.media[k].shape[0]) for p in prompts for k in PATCHES if k in p.media)
        return Unit(
            kind, b.index, run, b.groups, tuple(needs), kind not in PREFIX_KINDS, float(tokens), patches / tokens,
            **more,
        )  # fmt: skip

    # ---- what the units do ----

    def _score(self, g: int) -> None:
        rollouts = tuple(r for r in self.rollouts[g] if r is not None)
        result = self.rewards.score(self.prompts[g].sample, [r for r in rollouts if r.finish_reason != "abort"])
        self.failures += result.failures
        self.groups[g] = Group(g, self.prompts[g], rollouts, result.rewards, result.components)

    @property
    def held_bytes(self) -> int:
        """Bytes of prefix state alive: vision features, boundary tensors and, with a graph, saved activations."""
        return self.vision.held_bytes + sum(p.nbytes + p.saved_bytes for p in self.prefixes.values())

    def _prompts_of(self, b: Bundle) -> list[Prompt]:
        return [self.prompts[g] for g in b.groups]

    def _note_bytes(self) -> None:
        self.prefix_bytes_peak = max(self.prefix_bytes_peak, self.held_bytes)
        on_host = self.vision.host_bytes + sum(p.host_bytes for p in self.prefixes.values())
        self.prefix_host_bytes_peak = max(self.prefix_host_bytes_peak, on_host)

    def _vision(self, b: Bundle, *, graph: bool) -> None:
        self.vision.compute(b, graph=graph)
        self._note_bytes()

    def _compute_prefix(
        self, b: Bundle, name: Reader, model: SplitModel, prompts: Sequence[Prompt], vision: VisionState | None
    ) -> PrefixState:
        return model.prefix(prompts, grad=name == "act", vision=vision)

    def _prefix(self, b: Bundle, name: Reader, model: SplitModel) -> None:
        self.prefixes[name, b.index] = self._run_prefix(name, model, b, b.groups, self.vision.of(b, name))
        self._note_bytes()

    def _run_prefix(
        self, name: Reader, model: SplitModel, b: Bundle, groups: Sequence[int], vision: VisionState | None = None
    ) -> PrefixState:
        self.prefixes_recomputed += len(groups) if name == "act" and model.version > self._version else 0
        if vision is None:
            self.vision.ran(groups)
        prompts = [self.prompts[g] for g in groups] or self._prompts_of(b)
        return self._compute_prefix(b, name, model, prompts, vision)

    def _prefix_of(self, b: Bundle, name: Reader, model: SplitModel, rows: Sequence[tuple[int, int]]) -> PrefixState:
        """The bundle's shared prefix, or one of its own for each row."""
        if self.settings.share_prefix:
            return self.prefixes[name, b.index]
        return self._run_prefix(name, model, b, [g for g, _ in rows])

    def _score_suffix(self, b: Bundle, name: Reader, model: SplitModel) -> None:
        for rows in self._passes(b):
            prefix = self._prefix_of(b, name, model, rows)
            ids_NR, lengths_N = self._pad(rows)
            out = model.suffix(prefix, ids_NR, lengths_N, temperature=self.settings.sampling.temperature, grad=False)
            self._keep(name, rows, out.logps_NR)
        self.prefixes.pop((name, b.index), prefix).free()
        if name == "old":
            self.vision.done(b, last=False)

    def _train_suffix(self, b: Bundle, update: int) -> None:
        s = self.settings
        totals = self.totals.setdefault(update, StepTotals())
        for rows in self._passes(b):
            prefix = self._prefix_of(b, "act", self.actor, rows)
            ids_NR, lengths_N = self._pad(rows)
            out = self.actor.suffix(prefix, ids_NR, lengths_N, temperature=s.sampling.temperature, grad=True)
            if update == 0:
                self._keep("old", rows, out.logps_NR)
            kept_N = torch.tensor([self.kept(g)[i] for g, i in rows], device=out.mask_NR.device)
            mask_NR = out.mask_NR & kept_N[:, None]
            width = ids_NR.shape[1]
            old_NR = self._padded("old", rows, width).to(out.logps_NR)
            engine_NR = self._padded("engine", rows, width).to(out.logps_NR)
            weights_NR, weight_stats = importance_weights(
                old_NR, engine_NR, mask_NR, s.importance_sampling_mode, s.importance_sampling_cap
            )
            sums = policy_loss_sums(
                out.logps_NR, old_NR, self._advantages_of(rows).to(out.logps_NR), mask_NR, s.loss,
                ref_logps_BT=self._padded("ref", rows, width).to(out.logps_NR) if self.reference is not None else None,
                entropy_BT=out.entropy_NR,
                is_weights_BT=weights_NR if s.importance_sampling_mode is not None else None,
            )  # fmt: skip
            totals.add(sums, mismatch_stats(old_NR, engine_NR, mask_NR), weight_stats)
            if sums.loss.requires_grad:
                self.suffix_bytes = out.saved_bytes
                self.at_peak()
                sums.loss.backward()
                self.suffix_bytes = 0
            if not s.share_prefix:
                prefix.backward()

    def _backward(self, b: Bundle, update: int) -> None:
        self.actor.before_prefix_backward()
        self.prefixes.pop(("act", b.index)).backward()
        self.vision.done(b, last=update >= self.num_updates - self.num_mini_batches)

    # ---- advantages and what counts ----

    def _advantages_of(self, rows: Sequence[tuple[int, int]]) -> Tensor:
        return torch.stack([self.advantages(g).advantages_BG[self._row(g), i] for g, i in rows])

    def _row(self, g: int) -> int:
        return g if self.settings.scale_rewards == "batch" else 0

    def advantages(self, g: int) -> Advantages:
        """Of one group, or of all groups at once when they are scaled by the batch."""
        key = -1 if self.settings.scale_rewards == "batch" else g
        if key not in self._advantages:
            members = range(len(self.prompts)) if key == -1 else [g]
            rewards_BG = torch.stack([self.groups[j].rewards for j in members])
            self._advantages[key] = group_advantages(rewards_BG, scale_rewards=self.settings.scale_rewards)
        return self._advantages[key]

    def kept(self, g: int) -> list[bool]:
        """Which of a group's responses count in the loss and its normaliser."""
        if g not in self._kept:
            self._kept[g] = self._find_kept(g)
        return self._kept[g]

    def _find_kept(self, g: int) -> list[bool]:
        rollouts = [self._rollout(g, i) for i in range(self.settings.num_generations)]
        return kept_responses(
            torch.tensor([len(r) for r in rollouts]),
            ~torch.isnan(self.groups[g].rewards),
            torch.tensor([r.finish_reason != "stop" for r in rollouts]),
            mask_truncated_completions=self.settings.mask_truncated_completions,
        ).tolist()

    def _kept_lengths(self, groups: Sequence[int]) -> list[int]:
        banned = set(self.actor.banned_token_ids)
        lengths = []
        for g in groups:
            for keep, rollout in zip(self.kept(g), self.rollouts[g], strict=True):
                assert rollout is not None
                lengths.append(sum(t not in banned for t in rollout.token_ids.tolist()) if keep else 0)
        return lengths

    def normalizer(self, update: int) -> float:
        """What this update's accumulated gradient is divided by; NaN-free even when nothing is kept."""
        part = [g for b in self.bundles if b.mini_batch == update % self.num_mini_batches for g in b.groups]
        loss = self.settings.loss
        return loss_normalizer(
            loss.loss_type, self._kept_lengths(part), max_completion_length=loss.max_completion_length,
            batch_tokens=sum(self._kept_lengths(range(len(self.prompts)))), num_mini_batches=self.num_mini_batches,
        )  # fmt: skip

    def anything_kept(self, update: int) -> bool:
        part = [g for b in self.bundles if b.mini_batch == update % self.num_mini_batches for g in b.groups]
        return any(any(self.kept(g)) for g in part)
