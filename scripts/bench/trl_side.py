"""TRL's GRPOTrainer as a contender: the same model folder, pictures, prompts, response lengths, reward, learning rate.

Its generate has no length per row, so a logits processor forbids the end token before a row's last place and forces
it there. TRL then trains on exactly the same number of tokens per row; as in TRL's own use, generate keeps feeding
finished rows until the longest is done.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.gate import Gate, Missing
from bench.workload import Workload, reward_of

try:
    from datasets import Dataset
    from transformers import LogitsProcessor, LogitsProcessorList, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    raise Missing(f"TRL cannot be imported ({error}): pip install -e '.[bench]'") from error

CONTENDERS: dict[str, dict[str, Any]] = {
    "trl": {},
    "trl_tuned": dict(gradient_checkpointing=False, per_device_train_batch_size=4),
}
"""name -> settings of GRPOConfig that differ from what TRL ships with (checkpointing on, micro-batches of 8)."""


class RowLengths(LogitsProcessor):
    """Row i ends with the end token as its `lengths[i]`-th token, and not before."""

    def __init__(self, lengths: list[int], prompt_tokens: int, end: int, *, force: bool) -> None:
        self.lengths_N = torch.tensor(lengths)
        self.prompt_tokens, self.end, self.force = prompt_tokens, end, force

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = input_ids.shape[1] - self.prompt_tokens
        scores = scores.clone()
        scores[:, self.end] = -torch.inf
        if self.force:
            last_N = self.lengths_N == place + 1
            scores[last_N] = -torch.inf
            scores[last_N, self.end] = 0.0
        return scores


class Watch:
    """Seconds spent in some of a trainer's methods during the present step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.tokens = 0

    def wrap(self, owner: Any, method: str, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

        setattr(owner, method, timed)


class AskedSteps(TrainerCallback):
    """Waits at the gate before each optimizer step's work (a rollout batch)."""

    def __init__(self, gate: Gate, watch: Watch) -> None:
        self.gate, self.watch = gate, watch
        self.update_start = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.gate.arrive(self.details)
        self.watch.seconds.clear()
        self.watch.tokens = 0
        self.start = time.perf_counter()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.update_start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        self.watch.seconds["update"] = now - self.update_start
        self.watch.seconds["inner"] = now - self.start

    def details(self) -> dict[str, Any]:
        s = self.watch.seconds
        return {
            "rollout": s["generate"],
            "score": s["experience"] - s["generate"],
            "train": s["inner"] - s["experience"] - s["update"],
            "update": s["update"],
            "inner": s["inner"],
            "response_tokens": self.watch.tokens,
        }


def dataset(workload: Workload, steps: int) -> Any:
    """Rows of the workload; pictures stay in memory, so none is encoded and decoded on the way."""
    rows = [row for step in range(steps) for row in workload.rows_of(step)]
    pictures = {row: workload.picture(row) for row in rows}

    def with_pictures(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        return {
            "row": batch["row"],
            "prompt": [[{"role": "user", "content": workload.prompt_text(row)}] for row in batch["row"]],
            "images": [[pictures[row]] for row in batch["row"]],
        }

    return Dataset.from_dict({"row": rows}).with_transform(with_pictures)


def run(gate: Gate, workload: Workload, contender: str, options: dict[str, Any]) -> None:
    """Train until the parent says stop (raises Stop)."""
    torch.set_num_threads(options["threads"])
    responses = workload.B * workload.G
    chosen = {"per_device_train_batch_size": 8, **CONTENDERS[contender]}
    micro = math.gcd(chosen.pop("per_device_train_batch_size"), responses)
    watch = Watch()

    def bench_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        watch.tokens = sum(len(ids) for ids in completion_ids)
        return [reward_of(ids) for ids in completion_ids]

    with tempfile.TemporaryDirectory() as root:
        config = GRPOConfig(
            output_dir=root, use_cpu=True, bf16=False, seed=workload.seed, report_to="none", save_strategy="no",
            logging_strategy="no", disable_tqdm=True, per_device_train_batch_size=micro,
            gradient_accumulation_steps=responses // micro, num_generations=workload.G,
            max_completion_length=workload.max_length, beta=workload.beta, learning_rate=workload.learning_rate,
            lr_scheduler_type="constant", shuffle_dataset=False, num_train_epochs=1,
            model_init_kwargs={"dtype": "float32"}, **chosen,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=options["folder"], reward_funcs=bench_reward, args=config,
            train_dataset=dataset(workload, options["steps"]), callbacks=[AskedSteps(gate, watch)],
        )  # fmt: skip
        prescribe_lengths(trainer, workload)
        watch.wrap(trainer, "_generate", "generate")
        watch.wrap(trainer, "_generate_and_score_completions", "experience")
        trainer.train()
    raise AssertionError("training ended before the parent said stop")


def prescribe_lengths(trainer: Any, workload: Workload) -> None:
    """Give every generate call the rows' lengths, in the order in which TRL repeats prompts."""
    experience = trainer._generate_and_score_completions
    generate = trainer.model.generate
    rows: list[int] = []

    def remember(inputs: list[dict[str, Any]]) -> Any:
        rows[:] = [example["row"] for example in inputs]
        return experience(inputs)

    def generate_to_length(*args: Any, **kwargs: Any) -> Any:
        taken = {row: iter(workload.lengths_of(row)) for row in rows}
        lengths = [next(taken[row]) for row in rows]
        processor = RowLengths(
            lengths, kwargs["input_ids"].shape[1], trainer._tokenizer.eos_token_id, force=workload.lengths != "fixed"
        )
        return generate(*args, **kwargs, logits_processor=LogitsProcessorList([processor]))

    trainer._generate_and_score_completions = remember
    trainer.model.generate = generate_to_length
