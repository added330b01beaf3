"""vLLM in the trainer's process: its LLMEngine, stepped on the rollout lane.

Every response is a request of its own (n=1), so each returns as it ends; the prompt blocks of a group are shared by
the prefix cache all the same. What vLLM needs patched is in vllm_patches, prompts and sampling parameters are
converted in vllm_inputs, weights come by a binding of vllm_weights. vLLM is imported when the engine starts.
"""

from __future__ import annotations

import copy
import gc
import itertools
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rollplex.data.records import Request, Rollout
from rollplex.engines import vllm_inputs, vllm_patches, vllm_weights
from rollplex.engines.base import EngineContext, RolloutEngine, Vision, WindowState, is_shared
from rollplex.engines.sampling import check_params
from rollplex.engines.text import Detokenizer
from rollplex.engines.vllm_kv import HeldStates, KVMemory
from rollplex.engines.vllm_outputs import ResponseReader
from rollplex.engines.vllm_weights import CopiedWeights, WeightBinding
from rollplex.models.registry import check_vllm
from rollplex.models.split_model import SplitModel

CPU_KV_BYTES = 512 * 1024**2
"""KV cache on a CPU where nothing else is said: vLLM would take a share of all memory."""


@dataclass(frozen=True)
class _Live:
    """An unfinished request under its id in vLLM."""

    request: Request
    internal_id: str


class VLLMEngine(HeldStates, RolloutEngine):
    """Decodes with vLLM.

    Args:
        max_model_len: Most tokens of prompt and response together; None is the model's context. One such sequence
            must fit the KV cache.
        max_num_seqs: Rows decoded at once, over all groups.
        max_num_batched_tokens: Tokens of one step; None is 8192, on a CPU at least `max_model_len` (prompts are
            prefilled whole there). A picture or video must fit too.
        kv_cache_memory_bytes: Size of the KV cache; None is what `gpu_memory_utilization` leaves, on a CPU 512 MiB.
        gpu_memory_utilization: Share of the device's memory for weights and KV cache; without effect where
            `kv_cache_memory_bytes` is set.
        block_size: Tokens of a KV block; None is vLLM's choice. Only full blocks are shared within a group.
        enforce_eager: No compilation and no CUDA graphs; None is true on a CPU, false on a GPU.
        vision: "engine": vLLM runs its own vision tower on the processor's pixels. "shared": it gets what the trainer's
            tower makes of them, while training in the pass that serves the actor too, and holds no vision weights.
        tensor_parallel_size: Processes that share the engine, each with one rank of it, started by torchrun. All must
            submit, step, abort and publish alike.
        release_kv_cache: Give the KV cache's memory back while the trainer scores, trains and updates (on a GPU by
            vLLM's sleep mode, which takes KV memory from an allocator of its own).
    """

    def __init__(
        self,
        *,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        gpu_memory_utilization: float = 0.5,
        block_size: int | None = None,
        enforce_eager: bool | None = None,
        vision: Vision = "engine",
        tensor_parallel_size: int = 1,
        release_kv_cache: bool = True,
    ) -> None:
        self.takes_vision = is_shared(vision)
        for name, value in (
            ("max_model_len", max_model_len), ("max_num_seqs", max_num_seqs), ("block_size", block_size),
            ("max_num_batched_tokens", max_num_batched_tokens), ("kv_cache_memory_bytes", kv_cache_memory_bytes),
            ("tensor_parallel_size", tensor_parallel_size),
        ):  # fmt: skip
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1, or null for the default")
        if not 0 < gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization={gpu_memory_utilization} must be a share in (0, 1]")
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.kv_cache_memory_bytes = kv_cache_memory_bytes
        self.gpu_memory_utilization = gpu_memory_utilization
        self.block_size = block_size
        self.enforce_eager = enforce_eager
        self.tensor_parallel_size = tensor_parallel_size
        self.release_kv_cache = self.releases_kv = release_kv_cache
        self.copied_bytes = 0
        """Bytes of weights copied by the last `publish` (or by the start)."""
        self._weights: WeightBinding = CopiedWeights()
        self._engine: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._clear()

    def _clear(self) -> None:
        self._live: dict[str, _Live] = {}
        self._progress = 0
        self._ids = itertools.count()

    def bind(self, weights: WeightBinding) -> None:
        """Get weights by another way than a full copy after each update: before the start, until the close."""
        assert self._engine is None, "weights can be bound only before the engine starts"
        self._weights = weights

    # ---- start and end ----

    def start(self, context: EngineContext) -> None:
        assert self._engine is None, "the engine was started already"
        vllm_patches.check_version()
        if context.shards is None:
            vllm_patches.check_processes(self.tensor_parallel_size)
        check_vllm(context.model.config, self.tensor_parallel_size)
        vllm_patches.set_environment()
        self._tokenizer = getattr(context.processor, "tokenizer", context.processor)
        self._model: SplitModel = context.model
        self._version = context.model.version
        self._on_cpu = torch.device(context.device).type == "cpu"
        self._owns_distributed = not torch.distributed.is_initialized()
        # vLLM takes a folder: configs, tokenizer and processor. Weights it gets from the trainer's tensors.
        self._folder = tempfile.TemporaryDirectory(prefix="rollplex-vllm-")
        try:
            config = copy.deepcopy(context.model.config)
            config.architectures = [type(context.model.hf).__name__]
            config.save_pretrained(self._folder.name)
            context.processor.save_pretrained(self._folder.name)
            topology = None if context.shards is None else context.shards.topology
            local_rank = torch.device(context.device).index or int(os.environ.get("LOCAL_RANK", "0"))
            with vllm_patches.starting(topology, local_rank):
                self._engine = self._build(self._folder.name)
            self._check_started()
        except BaseException:
            self.close()
            raise

    def _build(self, folder: str) -> Any:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        with vllm_weights.loading(self._weights, self._model) as copied:
            engine: Any = LLMEngine.from_engine_args(EngineArgs(**self._arguments(folder)))
        (self.copied_bytes,) = copied
        self._scheduler = engine.engine_core.engine_core.scheduler
        runner = engine.model_executor.driver_worker.worker.model_runner
        if self._on_cpu:
            vllm_patches.count_ranks_without_compiler()
            vllm_patches.leave_global_generator_alone(runner.sampler)
        self._converter = vllm_inputs.PromptConverter(engine.vllm_config, self._model, embed=self.takes_vision)
        self._converter.attach(runner.model)
        self._reader = ResponseReader(engine.output_processor, Detokenizer(self._tokenizer))
        self._kv = KVMemory(engine, runner.kv_caches, on_cpu=self._on_cpu)
        self._own_weights = vllm_weights.own_tensors(runner.model, self._model, getattr(self._weights, "buffers", ()))
        engine.set_weight_version(str(self._version))
        return engine

    def _arguments(self, folder: str) -> dict[str, Any]:
        """Of vLLM's EngineArgs; everything that could differ from what the trainer computes is said."""
        text_config: Any = getattr(self._model.config, "text_config", self._model.config)
        context = int(text_config.max_position_embeddings)
        self._limit = min(self.max_model_len or context, context)
        batched = self.max_num_batched_tokens or 8192
        return {
            "model": folder,
            "load_format": vllm_weights.LOAD_FORMAT,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "seed": 0,
            "generation_config": "vllm",  # neutral values instead of the checkpoint's
            "logprobs_mode": "processed_logprobs",
            "max_model_len": self._limit,
            "max_num_seqs": self.max_num_seqs,
            # In pieces, a seeded prompt crashes on CPUs.
            "enable_chunked_prefill": not self._on_cpu,
            "max_num_batched_tokens": max(batched, self._limit) if self._on_cpu else batched,
            "kv_cache_memory_bytes": self.kv_cache_memory_bytes or (CPU_KV_BYTES if self._on_cpu else None),
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "block_size": self.block_size,
            "enforce_eager": self._on_cpu if self.enforce_eager is None else self.enforce_eager,
            "enable_prefix_caching": True,
            "async_scheduling": False,  # its outputs lag a step behind
            "enable_sleep_mode": self.release_kv_cache and not self._on_cpu,
            "mm_device_do_normalize": False,  # pixels come normalised from the HF processor
            "mm_processor_cache_gb": 0,  # vLLM's processor is not used
            "disable_log_stats": True,
        } | self._more_arguments()

    def _more_arguments(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        if self.takes_vision:
            out |= vllm_inputs.embeds_arguments(self._model)
        if self.tensor_parallel_size > 1:
            out["tensor_parallel_size"] = self.tensor_parallel_size
        if self.tensor_parallel_size > 1 or not (self._owns_distributed or torch.distributed.get_world_size() == 1):
            out["distributed_executor_backend"] = "external_launcher"
        return out

    def _check_started(self) -> None:
        config = self._engine.vllm_config
        assert not config.scheduler_config.async_scheduling
        assert config.model_config.logprobs_mode == "processed_logprobs"
        self._encoder_tokens = int(self._engine.input_processor.mm_encoder_cache_size)
        self._weights.verify()

    def close(self) -> None:
        engine, self._engine = self._engine, None
        self._weights = CopiedWeights()
        self._clear()
        if engine is not None:
            vllm_patches.shut_down(engine, owns_distributed=self._owns_distributed)
        elif self._folder is not None and self._owns_distributed:  # a start that failed half way
            from vllm.distributed import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()
        for name in ("_scheduler", "_converter", "_reader", "_kv", "_model"):
            self.__dict__.pop(name, None)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
            gc.collect()

    # ---- protocol ----

    def submit(self, requests: Sequence[Request]) -> None:
        engine = self._started
        banned = self._model.banned_token_ids
        checked: set[Any] = set()
        for r in requests:
            if r.params not in checked:
                check_params(r.params, self._model.head_weight.shape[0])
                vllm_inputs.check_temperature(r.params)
                checked.add(r.params)
            vllm_inputs.check_length(r, self._limit, self._model)
        for prompt in {id(r.prompt): r.prompt for r in requests}.values():
            vllm_inputs.check_media_sizes(prompt, self._encoder_tokens, self._model)
        if not self._live:
            self._weights.verify()
            self._converter.forget()
            self._kv.restore()
        converted: dict[int, Any] = {}
        for r in requests:
            if id(r.prompt) not in converted:
                features = r.prefix.features([r.group]) if r.prefix is not None else None
                if features is not None:
                    features.check_version(self._version)
                converted[id(r.prompt)] = self._converter.convert(r.prompt, features)
        for r in requests:
            name = str(next(self._ids))
            params = vllm_inputs.sampling_params(r.params, r.seed, banned)
            self._live[name] = _Live(r, engine.add_request(name, converted[id(r.prompt)], params))

    @torch.no_grad()
    def step(self) -> list[Rollout]:
        if self.window is WindowState.IDLE:
            return []
        before = self._computed()
        finished = [self._finished(out) for out in self._started.step() if out.finished]
        finished += self._stopped_by_strings()
        self._progress += bool(finished) or self._computed() != before
        return finished

    @property
    def window(self) -> WindowState:
        if not self._live:
            return WindowState.IDLE
        running, waiting = self._scheduler.get_request_counts()
        if waiting or not running or any(r.is_prefill_chunk for r in self._scheduler.running):
            return WindowState.PREFILL
        return WindowState.DECODE

    @property
    def num_running(self) -> int:
        return self._scheduler.get_request_counts()[0] if self._live else 0

    @property
    def progress(self) -> int:
        return self._progress

    def abort(self) -> list[Rollout]:
        if not self._live:
            return []
        rollouts = [
            self._reader.unfinished(live.request, live.internal_id, self._version, "abort")
            for live in self._live.values()
        ]
        self._started.abort_request([live.internal_id for live in self._live.values()], internal=True)
        self._live = {}
        return rollouts

    def publish(self, version: int) -> None:
        assert self.window is WindowState.IDLE, "weights may change only between rollouts"
        engine = self._started
        with torch.no_grad():
            self.copied_bytes = self._weights.refresh()
        self._drop_prompts()
        engine.reset_encoder_cache()
        engine.set_weight_version(str(version))
        self._version = version

    def _drop_prompts(self) -> None:
        """Forget the K/V of prompts that earlier weights computed."""
        if not self._started.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache: its blocks are in use though no request is unfinished")

    @property
    def _started(self) -> Any:
        assert self._engine is not None, "the engine is not started, or closed"
        return self._engine

    def release_kv(self) -> int:
        assert self.window is WindowState.IDLE, "K/V may be released only between rollouts"
        if not (self._on_cpu or self.release_kv_cache):
            return 0
        self._drop_prompts()
        return self._kv.release()

    def restore_kv(self) -> int:
        return self._kv.restore()

    # ---- the end of a response ----

    def _computed(self) -> int:
        return sum(r.num_computed_tokens for r in self._scheduler.running)

    def _finished(self, out: Any) -> Rollout:
        """A response that vLLM ended."""
        request = self._live.pop(out.request_id).request
        return self._reader.finished(request, out, self._version)

    def _stopped_by_strings(self) -> list[Rollout]:
        """End the rows whose newest token completes one of their stop strings."""
        rollouts, gone = [], []
        for name, live in self._live.items():
            stop = live.request.params.stop
            if not stop:
                continue
            if self._reader.completes(live.internal_id, stop):
                gone.append(name)
                rollouts.append(self._reader.unfinished(live.request, live.internal_id, self._version, "stop"))
        if gone:
            self._started.abort_request([self._live.pop(name).internal_id for name in gone], internal=True)
        return rollouts
