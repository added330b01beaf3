"""How the trainer's tensors get into vLLM's modules.

A `WeightBinding` says it: it fills (or binds) the modules once, while vLLM builds them, and brings them up to date
after each update. `CopiedWeights`, the plain one, copies everything each time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rollplex.models import lora
from rollplex.models.split_model import SplitModel

LOAD_FORMAT = "rollplex"
TOWERS = ("visual.", "vision_tower.")
"""How names of vLLM's vision parameters begin."""


class WeightBinding(Protocol):
    """Called on the rollout lane, never while requests are unfinished."""

    def place(self, model: nn.Module, source: SplitModel) -> int:
        """Give every parameter of vLLM's `model` its value; returns the bytes copied. `model` is just built, its
        parameters are uninitialised storage."""

    def refresh(self) -> int:
        """The source's weights changed; returns the bytes copied."""

    def verify(self) -> None:
        """Raises when the engine no longer computes with the source's weights. Called before each rollout."""


def wanted(model: nn.Module, source: SplitModel) -> Iterator[tuple[str, Tensor]]:
    """The trainer's weights, tied ones once; without the vision tower where vLLM's model has none. Adapters are merged,
    one layer at a time."""
    vision, blind = {id(p) for p in source.vision_parameters}, is_blind(model)
    hidden = {lora.plain_name(n) for n, p in source.hf.named_parameters() if blind and id(p) in vision}
    return ((name, t) for name, t in lora.whole_weights(source.hf) if name not in hidden)


def present(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """vLLM's parameters by name, but those without storage: what stands beside a tower that is left out (the
    image_newline of LLaVA-OneVision)."""
    return ((name, p) for name, p in model.named_parameters() if not p.is_meta)


def is_blind(model: nn.Module) -> bool:
    """Whether vLLM's model has no vision tower."""
    return not any(name.startswith(TOWERS) for name, _ in present(model))


def engine_name(name: str, source: SplitModel) -> str:
    """The name by which vLLM's model knows a weight of a checkpoint."""
    for ours, theirs in source.engine_names.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def own_tensors(model: nn.Module, source: SplitModel, buffers: Sequence[Tensor] = ()) -> tuple[list[Tensor], int]:
    """The parameters of vLLM's that are no view of the trainer's, each storage once, and their bytes.

    buffers: what a binding holds besides parameters.
    """
    theirs = {p.untyped_storage().data_ptr() for p in source.hf.parameters()}
    held = (*(p for _, p in present(model)), *buffers)
    mine = {t.untyped_storage().data_ptr(): t.detach() for t in held if t.numel()}
    own = [t for address, t in mine.items() if address not in theirs]
    return own, sum(t.nbytes for t in own)


class CopiedWeights:
    """The engine has weights of its own, filled by a full copy."""

    def place(self, model: nn.Module, source: SplitModel) -> int:
        self._model: Any = model
        self._source = source
        copied, filled = self._copy()
        empty = sorted({name for name, _ in present(model)} - filled)
        if empty:
            raise RuntimeError(f"vLLM's model has parameters that no tensor of the trainer's fills: {empty}")
        return copied

    def refresh(self) -> int:
        return self._copy()[0]

    def verify(self) -> None:
        pass

    def _copy(self) -> tuple[int, set[str]]:
        """Bytes copied, and vLLM's names of what was filled. vLLM fuses, splits and pads as for a checkpoint."""
        copied = 0

        def tensors() -> Iterator[tuple[str, Tensor]]:
            nonlocal copied
            # Whole tensors of a split trainer are gathered one by one, on all its ranks in this order.
            for name, tensor in wanted(self._model, self._source):
                shards = self._source.shards
                whole = tensor if shards is None else shards.whole(name, tensor)
                copied += whole.nbytes
                yield engine_name(name, self._source), whole

        with torch.no_grad():
            filled = self._model.load_weights(tensors())
        return copied, set(filled)


def keep_weights_plain(model: nn.Module) -> None:
    """Make vLLM compute with the parameters themselves on a CPU.

    Cause: there it packs linear weights for oneDNN and drops the originals
    (vllm/model_executor/layers/utils.py: dispatch_cpu_unquantized_gemm), so nothing could be filled a second time; the
    output head would go on with the packed first one. `_cpu_skip_gemm_dispatch` is vLLM's own flag for linear layers.
    """
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    def plain(layer: Any) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    for module in model.modules():
        layer: Any = module
        if isinstance(module, LinearBase):
            layer._cpu_skip_gemm_dispatch = True
        elif isinstance(module, VocabParallelEmbedding):
            layer.quant_method.process_weights_after_loading = plain


class _Building(threading.local):
    """What the loader places: vLLM makes it by name, so nothing can be handed to it."""

    place: Any = None


_building = _Building()


@contextmanager
def loading(binding: WeightBinding, source: SplitModel) -> Iterator[list[int]]:
    """An engine built inside, in this thread and with load_format=LOAD_FORMAT, gets its weights from `binding`.

    Gives a list that holds the bytes copied afterwards.
    """
    _register_loader()
    copied: list[int] = []

    def place(model: nn.Module) -> None:
        keep_weights_plain(model)
        copied.append(binding.place(model, source))

    _building.place = place
    try:
        yield copied
    finally:
        _building.place = None


def _register_loader() -> None:
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER as KNOWN
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    if LOAD_FORMAT in KNOWN:
        return

    @register_model_loader(LOAD_FORMAT)
    class TrainerLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            assert _building.place is not None, "an engine with trainer weights is built by VLLMEngine only"
            _building.place(model)
