"""Bytes on each device of a run as its config sets it up: what the run's own ledger will record on a rank.

Without `PhaseOffload` every state stays; with it each leaves in the stages that do not need it. Prefix work in the
decode window holds the prefixes of the whole rollout batch; without it one pass at a time. Several ranks share the
batch; ZeRO shards what its stage says. Gradients are whole on every rank, whatever the stage, until the update's one
reduction: backward calls of a step run inside DeepSpeed's scope in which nothing is reduced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rollplex.optim import packed
from rollplex.planner.activations import suffix_activations, text_bytes, tower_activations
from rollplex.planner.models import ModelShape
from rollplex.residency import (
    ACTIVATIONS,
    ACTOR_KV,
    ALL,
    ENGINE_WEIGHTS,
    GRADIENTS,
    KV_POOL,
    MASTERS,
    MOMENTS,
    OLD_KV,
    PA,
    PARAMETERS,
    PR,
    REFERENCE,
    REFERENCE_KV,
    SUFFIX,
    VISION,
    R,
    S,
    Stage,
    State,
    StateClass,
    T,
    U,
    run_state,
)

OFFLOADABLE = (MOMENTS, MASTERS, REFERENCE, KV_POOL, ACTIVATIONS)
"""What PhaseOffload's "auto" takes."""
MOVED_BY_DEEPSPEED = (MOMENTS, MASTERS)
"""Under ZeRO-3 of its own FusedAdam only, which no run here has."""
FLAT_BYTES = 256 * 1024**2
"""Gradients that `rollplex_ddp` reduces by one collective."""
VOCAB_MULTIPLE = 64
"""vLLM pads its vocabulary to a multiple of this."""


@dataclass(frozen=True)
class RunSettings:
    """What a config says, as far as memory depends on it."""

    itemsize: int = 4
    """Bytes of a parameter: 4 float32, 2 bfloat16 (then with float32 masters)."""
    ranks: int = 1
    """Data-parallel processes, one for each device."""
    zero: int = 0
    """DeepSpeed's stage; 0: everything is whole on each rank."""
    reduce_bucket: int = 500_000_000
    """Elements that DeepSpeed reduces by one collective."""
    persistence: int = 100_000
    """ZeRO-3 keeps parameters of at most so many elements whole on every rank."""
    prompts: int = 32
    """Of a rank's part of the rollout batch."""
    num_generations: int = 8
    prompt_tokens: int = 1800
    visual_share: float = 1.0
    """Part of the prompt's tokens that are visual."""
    max_completion_length: int = 256
    num_mini_batches: int = 1
    prompts_per_pass: int = 1
    responses_per_pass: int | None = None
    reference: bool = False
    freeze: tuple[str, ...] = ()
    """Parts that are not trained."""
    lora_sizes: tuple[int, ...] = ()
    """Elements of each adapter weight; with any, the reference has no weights of its own."""
    lora_trained: tuple[int, ...] = ()
    """Of those that are trained, and nothing else is."""
    lora_merged: int = 0
    """Elements of the weights that have adapters."""
    prefix_checkpointing: bool = False
    suffix_checkpointing: bool = False
    prefix_on_host: bool = False
    overlap: bool = False
    streaming: bool = False
    reuse: bool = False
    """PrefillReuse: the engine's prompts are the actor's prefixes."""
    prefix_budget_bytes: int | None = None
    engine: str = "torch"
    """torch, vllm, or remote: whichever it is, on devices of its own."""
    shared_weights: bool = False
    """vLLM computes with the trainer's tensors."""
    engine_vision: bool = True
    """vLLM has a vision tower."""
    shared_vision: bool = False
    """One vision pass, before the rollout, for engine and trainer."""
    kv_cache_bytes: int | None = None
    """Of vLLM's pool; None is what `kv_share` of the device leaves beside vLLM's weights."""
    kv_share: float = 0.5
    max_num_seqs: int = 256
    releases_kv: bool = False
    offload: tuple[str, ...] = ()
    update_chunk_bytes: int | None = None
    workspace_gib: float = 0.0
    """Of contexts, kernels and fragmentation; no state of the run's ledger."""

    @property
    def lora_params(self) -> int:
        """Elements of all adapters."""
        return sum(self.lora_sizes)

    @property
    def on_host(self) -> bool:
        return self.prefix_on_host or ACTIVATIONS in self.offload

    @property
    def frozen_vision(self) -> bool:
        """Nothing between pixels and language model is trained."""
        return {"vision_tower", "projector"} <= set(self.freeze)

    @property
    def first_mini_batch(self) -> int:
        """Prompts of the update that follows the rollout."""
        return -(-self.prompts // self.num_mini_batches)


def run_states(m: ModelShape, s: RunSettings) -> list[State]:
    """Every large state, in the order of the ledger."""
    return [*_trainer_states(m, s), *_engine_states(m, s), *_pass_states(m, s), *_temporary(m, s)]


def trained(m: ModelShape, s: RunSettings) -> int:
    """Parameters that have gradients and optimizer states."""
    if s.lora_params:
        return sum(s.lora_trained)
    parts = {
        "language_model": m.language_params, "projector": m.projector_params,
        "vision_tower": m.vision_params - m.projector_params,
    }  # fmt: skip
    return m.params - sum(size for name, size in parts.items() if name in s.freeze)


def _trainer_states(m: ModelShape, s: RunSettings) -> Iterator[State]:
    weights, learning = float((m.params + s.lora_params) * s.itemsize), trained(m, s)
    narrow = s.itemsize < 4
    part_of = s.ranks if s.zero == 3 else 1
    kind = StateClass.REGENERABLE if narrow or s.zero else StateClass.PERMANENT
    yield run_state(PARAMETERS, weights / part_of + _persistent(m, s), kind=kind)
    # DeepSpeed keeps float32 masters of float32 parameters, too.
    optimizer = {MOMENTS: 8.0 * learning} | ({MASTERS: 4.0 * learning} if narrow or s.zero else {})
    part = _chunks_share(m, s, 12 if narrow else 8)
    for name, size in optimizer.items():
        gone, size = name in s.offload, size / (s.ranks if s.zero else 1)
        yield run_state(name, size, resident=size * part if gone else None, left=0.0 if gone else size)
    grown = {T, U} | ({PA, S} if s.streaming else set())
    gradients, own = float(learning * s.itemsize), float(learning * s.itemsize) / part_of if s.zero == 3 else 0.0
    yield run_state(GRADIENTS, gradients + own, needed=frozenset(grown), left=own)
    if s.reference and not s.lora_params:
        needed = {S} | ({PR} if s.overlap else set()) | ({PA} if s.overlap and (s.streaming or s.reuse) else set())
        left = 0.0 if REFERENCE in s.offload else weights
        yield run_state(REFERENCE, weights, needed=frozenset(needed), left=left)


def _persistent(m: ModelShape, s: RunSettings) -> float:
    """Of small parameters, which ZeRO-3 keeps whole beside their shards."""
    if s.zero != 3:
        return 0.0
    norms = (2 * m.layers + 1, m.hidden)
    small = sum(n for n in m.sizes if n <= s.persistence) if m.sizes else norms[0] * norms[1]
    small += sum(n for n in s.lora_sizes if n <= s.persistence)
    return float(small * s.itemsize)


def smallest_chunk(m: ModelShape, s: RunSettings) -> int:
    """Bytes of the optimizer states of the largest parameter: of models of the table the embeddings, which have as many
    elements as the output head."""
    return (8 if s.itemsize == 4 else 12) * max(s.lora_trained or m.sizes, default=m.vocab * m.hidden)


def _chunks_share(m: ModelShape, s: RunSettings, per_element: int) -> float:
    """Largest part of the optimizer states that is on the device at once: two neighbouring chunks."""
    if s.update_chunk_bytes is None:
        return 1.0
    sizes = s.lora_trained or m.sizes
    if not sizes:
        return min(1.0, 2 * s.update_chunk_bytes / (per_element * m.params))
    chunks = [sum(part) for part in packed([per_element * n for n in sizes], s.update_chunk_bytes)]
    pairs = [a + b for a, b in zip(chunks, [*chunks[1:], 0], strict=True)]
    return max(pairs) / sum(chunks)


def _engine_states(m: ModelShape, s: RunSettings) -> Iterator[State]:
    released = s.releases_kv or KV_POOL in s.offload
    per_token = m.kv_bytes_per_token * s.itemsize / 2
    whole = float((m.params + s.lora_params) * s.itemsize)
    own = whole if s.zero == 3 else 0.0  # the whole weights that an engine reads
    if s.engine == "vllm" and not s.shared_weights:
        padding = -m.vocab % VOCAB_MULTIPLE * m.hidden * (1 if m.tied else 2)
        own += float((m.params - (0 if s.engine_vision else m.vision_params) + padding) * s.itemsize)
    elif s.engine == "vllm":
        own += float(s.lora_merged * s.itemsize)
    if own:
        yield run_state(ENGINE_WEIGHTS, own, left=own)
    if s.engine == "remote":
        return
    if s.engine == "vllm":
        pool = float(s.kv_cache_bytes or 0)
        yield run_state(KV_POOL, pool, left=0.0 if released else pool)
        return
    # TorchEngine: the prompts' K/V (the trainer's, with PrefillReuse) and room for what the rows sample.
    prompts = 0.0 if s.reuse else s.prompts * s.prompt_tokens * per_token
    rows = min(s.max_num_seqs, s.prompts * s.num_generations)
    room = rows * (s.max_completion_length - 1) * per_token
    yield run_state(KV_POOL, prompts + room, left=0.0 if released else room)


def _pass_states(m: ModelShape, s: RunSettings) -> Iterator[State]:
    per_token = m.kv_bytes_per_token * s.itemsize / 2
    one_pass = min(s.prompts_per_pass, s.prompts)
    held = s.prompts if s.overlap else one_pass
    first = s.first_mini_batch if s.overlap or s.reuse else one_pass

    def boundary(prompts: float) -> float:
        return prompts * (s.prompt_tokens * per_token + m.hidden * s.itemsize)

    if s.reference:
        needed = frozenset({S} | ({PR, PA} if s.overlap else set()))
        yield run_state(REFERENCE_KV, boundary(held), needed=needed)
    if s.num_mini_batches > 1:
        old = s.prompts - first if s.overlap or s.reuse else one_pass
        yield run_state(OLD_KV, boundary(old), needed=frozenset({S} | ({PA} if s.overlap or s.reuse else set())))
    early = {PA, S} if s.overlap else set()
    early |= {R, PR, PA, S} if s.reuse else set()
    text, tower = _saved(m, s, first)
    kv, here = boundary(first), 0.0 if s.on_host else text + tower
    if s.prefix_budget_bytes is not None and kv + here > s.prefix_budget_bytes:
        kv, here = (x * s.prefix_budget_bytes / (kv + here) for x in (kv, here))
    yield run_state(ACTOR_KV, kv, needed=frozenset({T} | early))
    if s.shared_vision:
        width = m.feature_width * s.itemsize
        features = s.visual_share * s.prompt_tokens * width * s.prompts
        last = features if s.frozen_vision else features / s.prompts * s.first_mini_batch
        yield run_state(VISION, features, elsewhere={T: last})
    # Shared towers' graphs are there from before the rollout, the text's as prefixes are.
    before = here * tower / (text + tower) if s.shared_vision else 0.0
    stages: Iterator[Stage] = (x for x in (R, PR, PA, S) if x not in early)
    elsewhere = {x: before for x in stages} if s.shared_vision else None
    yield run_state(ACTIVATIONS, text + tower, resident=here, needed=frozenset({T} | early), elsewhere=elsewhere)
    rows = (s.responses_per_pass or s.num_generations) * one_pass
    suffix = suffix_activations(
        m, s.itemsize, rows, s.max_completion_length, checkpointing=s.suffix_checkpointing
    )  # fmt: skip
    yield run_state(SUFFIX, suffix, needed=frozenset({T} | ({PA} if s.streaming else set())))


def _saved(m: ModelShape, s: RunSettings, prompts: int) -> tuple[float, float]:
    """(text model, vision tower): what autograd saves for the prefixes of `prompts` prompts; of shared towers, for
    those of the whole first mini-batch."""
    tokens = prompts * s.prompt_tokens
    text = tokens * text_bytes(m, s.itemsize, checkpointing=s.prefix_checkpointing)
    if s.frozen_vision:
        return text, 0.0
    seen = (s.first_mini_batch * s.prompt_tokens if s.shared_vision else tokens) * s.visual_share
    return text, tower_activations(m, s.itemsize, seen, checkpointing=s.prefix_checkpointing)


def _temporary(m: ModelShape, s: RunSettings) -> Iterator[State]:
    """What no holder of the run's ledger owns: buffers of single operations, and what is no tensor at all."""
    if s.zero:
        # The whole of it, however small the model.
        size = float(s.reduce_bucket * s.itemsize)
        yield State("reduction buffer", size, frozenset({U}), StateClass.PHASE_LOCAL, left=size if s.zero == 3 else 0.0)
    elif s.ranks > 1:
        size = float(min(FLAT_BYTES, trained(m, s) * s.itemsize))
        yield State("reduction buffer", size, frozenset({U}), StateClass.PHASE_LOCAL)
    if s.zero == 3:
        largest = float(max(m.sizes, default=m.vocab * m.hidden) * s.itemsize)
        yield State("gathered parameters", largest, frozenset({PA, S, T}), StateClass.PHASE_LOCAL)
    if s.workspace_gib:
        yield State("workspace", s.workspace_gib * 1024**3, ALL, StateClass.PHASE_LOCAL)


# ---- what to change when it does not fit ----


def run_knobs(s: RunSettings, m: ModelShape) -> Iterator[tuple[str, Any]]:
    """(setting, value), each a step further than the one before: first what costs no time, then what costs some."""
    moved = tuple(name for name in OFFLOADABLE if s.zero != 3 or name not in MOVED_BY_DEEPSPEED)
    yield "offload", tuple(name for name in moved if name != ACTIVATIONS)
    if s.engine == "vllm":
        yield "shared_weights", True
    yield "prefix_checkpointing", True
    yield "suffix_checkpointing", True
    yield "offload", moved
    if not s.zero:
        yield "update_chunk_bytes", smallest_chunk(m, s)
    if s.responses_per_pass != 1:
        yield "responses_per_pass", 1
    for part in (2, 4, 8, 16):
        if s.kv_cache_bytes:
            yield "kv_cache_bytes", s.kv_cache_bytes // part
        if s.engine == "torch" and s.max_num_seqs // part >= 1:
            yield "max_num_seqs", s.max_num_seqs // part
        if s.prompts // part >= 1:
            yield "prompts", s.prompts // part
    if s.itemsize == 4:
        if not s.zero:  # the states of a parameter are larger then, by its float32 master
            yield "update_chunk_bytes", smallest_chunk(m, replace(s, itemsize=2))
        yield "itemsize", 2


NAMES = {
    "itemsize": "dtype", "prompts": "batch_size", "kv_cache_bytes": "kv_cache_memory_bytes",
    "offload": "callbacks: PhaseOffload, offload", "update_chunk_bytes": "PhaseOffload's update_chunk_bytes",
    "shared_weights": "callbacks: SharedWeights",
}  # fmt: skip
"""Settings as a config calls them, where it has another name."""


def in_config_words(name: str, old: Any, new: Any, ranks: int = 1) -> str:
    """One change, as somebody would write it into the config. ranks: they share the config's batch."""
    if name == "prompts":
        old, new = old * ranks, new * ranks
    if name == "itemsize":
        old, new = ({2: "bfloat16", 4: "float32"}[x] for x in (old, new))
    if name == "offload":
        old, new = old and list(old), "auto" if ACTIVATIONS in new else list(new)
    return f"{NAMES.get(name, name)} {old or 'none'} -> {new}"


def with_pool(s: RunSettings, m: ModelShape, device_bytes: float) -> RunSettings:
    """The size of vLLM's pool, where the config leaves it to vLLM."""
    if s.engine != "vllm" or s.kv_cache_bytes is not None:
        return s
    own = sum(state.bytes for state in _engine_states(m, s) if state.name == ENGINE_WEIGHTS)
    return replace(s, kv_cache_bytes=max(0, int(s.kv_share * device_bytes - own)))


def resident(s: RunSettings) -> RunSettings:
    """The same run with nothing that leaves the device."""
    return replace(s, offload=(), releases_kv=False, update_chunk_bytes=None, prefix_on_host=False)
