"""GRPO as a LightningModule: settings, one training step, evaluation. The work itself lives in `step.py`.

Users rarely subclass this; a new task is a `VLMTask`.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule

from rollplex.checkpoints import RandomStates, WithRandomStates
from rollplex.checks import KEPT_ON_RESUME, check_batches, check_reference, check_resume, settle_settings, warn_resume
from rollplex.data.records import Prompt, SamplingParams
from rollplex.evaluation import WithEvaluation
from rollplex.grpo.advantages import ScaleRewards
from rollplex.grpo.importance import ImportanceMode
from rollplex.grpo.losses import ImportanceLevel, KLEstimator, LossSettings, LossType
from rollplex.metrics import admission_metrics, merge, step_tallies, tallies, time_metrics, values
from rollplex.models.policy import add_base_weights, keep_adapters_alone, make_models, place_reference, weights_print
from rollplex.models.registry import load_processor
from rollplex.models.split_model import Part, SplitModel
from rollplex.optim import make_optimizer
from rollplex.rank_step import LockstepStep, RankStep, Share, agree_on_share, whole_share
from rollplex.ranks import Ranks
from rollplex.resample import LockstepRound, RoundStep, resample_metrics, run_rounds
from rollplex.rewards.runner import RewardRunner
from rollplex.step import GRPOStep
from rollplex.step_log import StepLog
from rollplex.step_settings import StepSettings
from rollplex.updates import GradientUpdate
from rollplex.vision import vision_settings

SchedulerType = Literal["constant", "constant_with_warmup", "linear", "cosine"]


class GRPOModule(WithRandomStates, WithEvaluation, LightningModule):
    """Synchronous on-policy GRPO (arXiv 2402.03300) for a vision-language model.

    One `training_step` is one rollout batch: generate, score, one or more optimizer steps, publish.

    Args:
        model: Folder of a transformers model with its processor.
        num_generations: Responses per prompt (G).
        max_completion_length: Most tokens of a response, end token included.
        temperature: Of sampling; the policy that is trained is the one at this temperature.
        top_p: Nucleus sampling in the engine; 1 is off. The trainer's log-probs do not know of truncation: with
            top_p, top_k, min_p or repetition_penalty set, use `importance_sampling_mode`.
        top_k: 0 is off.
        min_p: 0 is off.
        repetition_penalty: 1 is off.
        stop: Strings that end a response, besides the end token.
        beta: Weight of the KL term to the initial model; 0 holds no reference model.
        kl_estimator: k1, k2 or k3.
        epsilon: Lower clip range.
        epsilon_high: Upper clip range; None is `epsilon`.
        delta: Upper bound of the ratio at negative advantages; None is off.
        loss_type: How token losses are averaged.
        importance_sampling_level: Ratio per token, or per sequence (GSPO).
        scale_rewards: Divide advantages by the standard deviation of the group, the batch, or not.
        entropy_coef: Weight of the entropy bonus.
        mask_truncated_completions: Leave responses without an end token out of the loss.
        dynamic_sample: Leave groups without spread in their rewards out, and draw others in their place (DAPO).
        max_resample_times: Most rollouts added to a step for that; then it trains on what it has.
        num_iterations: Passes over each rollout batch.
        num_mini_batches: Optimizer steps per pass; groups are never split.
        importance_sampling_mode: Correction of the engine-trainer mismatch; None is off.
        importance_sampling_cap: Its bound.
        reward_weights: Weight of each named reward; None weighs all by 1.
        reward_timeout: Seconds one reward call may take; a late one counts as missing.
        reward_workers: Processes for rewards; 0 calls them in this process.
        learning_rate: Of AdamW.
        weight_decay: Of AdamW, on matrices.
        adam_beta1: Of AdamW.
        adam_beta2: Of AdamW.
        lr_scheduler_type: transformers' schedule, over optimizer steps.
        warmup_steps: Optimizer steps of linear warm-up.
        lr_decay_steps: Optimizer steps after which "linear" and "cosine" reach 0.
        max_grad_norm: Gradient norm is clipped to this; None is off.
        freeze: Parts that are not trained.
        lora: Train adapters alone (not with train_tp): settings of peft's LoraConfig (r, lora_alpha, ...). None: all.
        dtype: Of the parameters.
        prefix_checkpointing: Recompute prefix activations in backward.
        suffix_checkpointing: Recompute suffix activations in backward.
        prefix_on_host: Keep what backward needs of prefixes in (pinned) host memory until then.
        prompts_per_pass: Prompts of equal length that share a prefix pass.
        responses_per_pass: Responses of each prompt in one suffix pass; None takes all.
        share_prefix: One prefix per prompt; false recomputes it for each response, the baseline of other systems.
        eval_num_generations: Responses per prompt in validation and test; above 1 gives pass@k.
        eval_temperature: 0 is greedy.
        seed: Of sampling; None is that of seed_everything, or 0. The order of rows has its own (the data module's).
    """

    def __init__(
        self,
        model: str,
        num_generations: int = 8,
        max_completion_length: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop: list[str] | None = None,
        beta: float = 0.0,
        kl_estimator: KLEstimator = "k3",
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        delta: float | None = None,
        loss_type: LossType = "dapo",
        importance_sampling_level: ImportanceLevel = "token",
        scale_rewards: ScaleRewards = "group",
        entropy_coef: float = 0.0,
        mask_truncated_completions: bool = False,
        dynamic_sample: bool = False,
        max_resample_times: int = 3,
        num_iterations: int = 1,
        num_mini_batches: int = 1,
        importance_sampling_mode: ImportanceMode | None = None,
        importance_sampling_cap: float = 3.0,
        reward_weights: dict[str, float] | None = None,
        reward_timeout: float | None = 60.0,
        reward_workers: int = 0,
        learning_rate: float = 1e-6,
        weight_decay: float = 0.0,
        adam_beta1: float = 0.9,
        adam_beta2: float = 0.999,
        lr_scheduler_type: SchedulerType = "constant",
        warmup_steps: int = 0,
        lr_decay_steps: int | None = None,
        max_grad_norm: float | None = 1.0,
        freeze: list[Part] | None = None,
        lora: dict[str, Any] | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        prefix_checkpointing: bool = False,
        suffix_checkpointing: bool = False,
        prefix_on_host: bool = False,
        prompts_per_pass: int = 1,
        responses_per_pass: int | None = None,
        share_prefix: bool = True,
        eval_num_generations: int = 1,
        eval_temperature: float = 0.0,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        settle_settings(self.hparams)
        self.automatic_optimization = False
        self.loss_settings = LossSettings(
            beta=beta, kl_estimator=kl_estimator, epsilon=epsilon, epsilon_high=epsilon_high, delta=delta,
            loss_type=loss_type, importance_sampling_level=importance_sampling_level, entropy_coef=entropy_coef,
            max_completion_length=max_completion_length,
        )  # fmt: skip
        self.rollouts_done = 0
        """Rollout batches trained on; keys data order and sampling, and is part of the checkpoint."""
        self.updates_in_step = 0
        """Optimizer steps already taken of the rollout batch in progress; above 0 the weights are between batches."""
        self.policy: Any = None
        self.actor: SplitModel
        self.reference: SplitModel | None = None
        self._processor: Any = None
        self._reference_print: list[float] | None = None
        self.random_states = RandomStates()
        self._vision: dict[str, bool] = {}
        """Of `StepSettings`: who reads one vision pass, found when training starts."""

    # ---- set-up ----

    @property
    def processor(self) -> Any:
        """The transformers processor of the model folder."""
        if self._processor is None:
            self._processor = load_processor(self.hparams["model"])
        return self._processor

    def configure_model(self) -> None:
        if self.policy is not None:
            return
        h = self.hparams
        self.actor, self.reference = make_models(h)
        self.policy = self.actor.hf
        self._reference_print = weights_print(self.policy)

    def place(self, device: torch.device, whole: SplitModel | None = None) -> None:
        """Called by the strategy: the reference is no submodule, so it stays out of checkpoints. whole: see there."""
        if self.reference is not None:
            place_reference(self.reference, self.actor, device, whole)

    def setup(self, stage: str) -> None:
        task = getattr(getattr(self.trainer, "datamodule", None), "task", None)
        if task is None:
            raise ValueError("GRPOModule needs a VLMDataModule: pass datamodule=VLMDataModule(task=...) to the trainer")
        h = self.hparams
        if stage == "fit":
            check_batches(h, getattr(self.trainer, "datamodule", None))
        self.task, self.step_log = task, StepLog(self, task)
        self._runners = {
            n: RewardRunner(
                task, num_generations=n, timeout=h["reward_timeout"], workers=h["reward_workers"],
                reward_weights=h["reward_weights"],
            )
            for n in {h["num_generations"] if stage == "fit" else h["eval_num_generations"], h["eval_num_generations"]}
        }  # fmt: skip

    def close_rewards(self) -> None:
        """Called by the strategy: Lightning calls no `teardown` hook when a run fails or is stopped."""
        for runner in getattr(self, "_runners", {}).values():
            runner.close()

    def sampling(self, *, evaluate: bool = False) -> SamplingParams:
        """How responses are sampled; everything is set, so a checkpoint's generation_config has no say."""
        h = self.hparams
        neutral = dict(top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, temperature=h["eval_temperature"])
        chosen = {k: h[k] for k in neutral}
        return SamplingParams(
            max_tokens=h["max_completion_length"],
            stop=tuple(h["stop"] or ()),
            stop_token_ids=(self.processor.tokenizer.eos_token_id,),
            banned_token_ids=self.actor.banned_token_ids,
            **(neutral if evaluate else chosen),
        )

    def configure_optimizers(self) -> Any:
        masters = getattr(self.trainer.strategy, "keeps_masters", False)
        return make_optimizer(self.policy.parameters(), self.hparams, own_masters=not masters)

    # ---- training ----

    def on_train_start(self) -> None:
        super().on_train_start()
        colocation, strategy = self.colocation, self.trainer.strategy
        whole = {"gathered": strategy.gathered} if hasattr(strategy, "gathered") else {}
        self._vision = vision_settings(
            colocation.engine, self.actor, self.reference, share_prefix=self.hparams["share_prefix"],
            sharded=colocation.executor.exchange is not None, **whole,
        )  # fmt: skip

    def new_step(self, prompts: list[Prompt], share: Share | None = None, *, rounds: Any = None) -> GRPOStep:
        """share: the rank's part of the batch; None is all of it. rounds: of a step with `dynamic_sample`."""
        h = self.hparams
        settings = StepSettings.of(h, sampling=self.sampling(), loss=self.loss_settings, **self._vision)
        parts = (self.actor, self.reference, self.rewards(h["num_generations"]), prompts, settings)
        lockstep = self.colocation.executor.lockstep
        alike = lockstep is not None and not lockstep.same_groups  # ranks make up for groups that others have
        if h["dynamic_sample"]:
            share = share or whole_share(len(prompts))
            return (LockstepRound if alike else RoundStep)(*parts, share=share, rounds=rounds or [])
        return GRPOStep(*parts) if share is None else (LockstepStep if alike else RankStep)(*parts, share=share)

    def training_step(self, batch: list[Prompt], batch_idx: int) -> dict[str, Any] | None:
        """One rollout batch. Returns {"loss", "groups", "metrics"} for callbacks' on_train_batch_end."""
        self.updates_in_step = 0
        colocation, ranks = self.colocation, self.ranks
        if colocation.executor.stops_together:
            colocation.executor.stop_together(ranks)
        share = None if ranks.alone else agree_on_share(getattr(batch, "places", range(len(batch))), ranks)
        if not (batch if share is None else share.groups):  # every row was bad; the data module has named them
            self.rollouts_done += 1
            self.step_log.no_rows()
            return None
        self.random_states.begin()
        start = time.perf_counter()
        step = self.new_step(batch) if share is None else self.new_step(batch, share)
        self.zero_grad(set_to_none=True)
        self.gradient_update.begin()
        rounds = run_rounds(self, step)
        self.step_log.check_rewards(rounds)
        metrics: dict[str, float] = {}
        for update in range(step.num_updates):
            if update > 0:
                self.gradient_update.begin()
                colocation.executor.train(step.units(update))
            metrics.update(self._update(step, update))
        colocation.publish()
        self.rollouts_done += 1
        times = time_metrics(colocation.timeline, time.perf_counter() - start, sum(part.tokens for part in rounds))
        own = merge([step_tallies(part) for part in rounds])
        own |= tallies(times | admission_metrics(colocation.executor.admission) | resample_metrics(rounds))
        own |= tallies({"rows_skipped": float(self.trainer.datamodule.rows_skipped(ranks))})
        metrics |= values(merge(ranks.gather(own | tallies(colocation.watch.metrics()))))
        self.step_log.log(metrics, max(1, len(batch)))
        self.updates_in_step = 0
        self.random_states.end()
        groups = [part.groups[g] for part in rounds for g in sorted(part.groups)]
        return {"loss": torch.tensor(metrics.get("loss", 0.0)), "groups": groups, "metrics": metrics}

    def _update(self, step: GRPOStep, update: int) -> dict[str, float]:
        """UPDATE: one rescale of the summed gradient, clipping, optimizer step, schedule."""
        self.colocation.executor.enter_update()
        optimizer: Any = self.optimizers()
        if isinstance(step, RankStep):
            step.settle(update)
        scale = 1.0 / step.normalizer(update) if step.anything_kept(update) else None
        self.gradient_update.finish(self.policy.parameters(), scale, self.hparams["max_grad_norm"])
        lr = float(optimizer.param_groups[0]["lr"])
        self.updates_in_step += 1  # before: an error half way through leaves weights that must not be saved
        optimizer.step()
        norm = self.gradient_update.norm()
        optimizer.zero_grad(set_to_none=True)
        self.lr_schedulers().step()  # type: ignore[union-attr]
        self.actor.version += 1
        return {"grad_norm": norm, "lr": lr, "updates": float(self.trainer.global_step)}

    @property
    def ranks(self) -> Ranks:
        """The data-parallel processes of the run."""
        return getattr(self.trainer.strategy, "ranks", None) or Ranks()

    @property
    def gradient_update(self) -> GradientUpdate:
        """What the strategy does with accumulated gradients."""
        return self.trainer.strategy.gradients

    @property
    def colocation(self) -> Any:
        """The strategy's engine and lanes."""
        colocation = getattr(self.trainer.strategy, "colocation", None)
        if colocation is None:
            raise ValueError(
                f"trainer.strategy={type(self.trainer.strategy).__name__} has no rollout engine; set strategy: rollplex"
            )
        return colocation

    # ---- checkpoints ----

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["rollplex"] = {
            "rollouts_done": self.rollouts_done,
            "weights_version": self.actor.version,
            "reference_print": self._reference_print,
            "settings": {name: self.hparams[name] for name in KEPT_ON_RESUME},
            "random": self.ranks.gather(self.random_states.state_dict()),
        }
        keep_adapters_alone(checkpoint, self.actor)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint.get("rollplex")
        if state is None:
            raise ValueError("this checkpoint was not written by Rollplex; start from a model folder instead")
        check_resume(state.get("settings", {}), self)
        warn_resume(checkpoint.get("hyper_parameters", {}), self)
        add_base_weights(checkpoint, self.actor)
        self.rollouts_done = state["rollouts_done"]
        self.actor.version = state["weights_version"]
        kept = state["random"]
        own = kept[min(self.ranks.rank, len(kept) - 1)] if isinstance(kept, list) else kept
        self.random_states.load_state_dict(own)
        check_reference(state["reference_print"], self)
