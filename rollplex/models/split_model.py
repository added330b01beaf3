"""A vision-language model whose every pass is split into prefix (vision tower + prompt) and suffix (responses).

`SplitModel` wraps a transformers model and owns the two passes; a family file says where that family keeps its parts
and how its positions run. The prefix is computed once per bundle: B prompts of *equal token length*, so that nothing
is ever padded on the left or masked. All G responses of each prompt read it.

Shape legend: B prompts of a bundle, P prompt tokens, G responses per prompt, N = B*G rows, R response tokens
(right-padded), T = R-1 suffix inputs, H hidden size, V vocabulary, M valid response tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from rollplex.data.records import Prompt
from rollplex.models import lora
from rollplex.models.attention import ATTENTION_NAME, STATE_KEYWORD
from rollplex.models.blank import vision_embeddings
from rollplex.models.checkpointing import Checkpointing
from rollplex.models.head import PolicyHead
from rollplex.models.logprobs import linear_logps
from rollplex.models.positions import Known, remembered
from rollplex.models.prefix import PrefixState, ReadPrefix, RecordPrefix
from rollplex.models.saved import SavedActivations
from rollplex.models.support import Support, refuse_unsplittable
from rollplex.models.twin import empty_tree, point_at, same_storage
from rollplex.models.vision import VisionState, feature_tokens

if TYPE_CHECKING:
    from rollplex.tensor_parallel import Shards

PASS_SETTINGS = ("prefix_checkpointing", "suffix_checkpointing", "prefix_on_host")
"""Keywords of `SplitModel` that trade time for memory."""

Part = Literal["vision_tower", "projector", "language_model"]
Kind = Literal["image", "video"]


@dataclass(frozen=True)
class SuffixOutput:
    """Per-token results of a suffix pass, padded positions 0."""

    logps_NR: Tensor
    entropy_NR: Tensor
    mask_NR: Tensor
    """True for tokens that exist and lie in the policy's support (a banned token that came anyway is left out)."""
    saved_bytes: int = 0
    """Bytes that autograd saved for this pass's backward, besides the prefix's own tensors."""


class SplitModel(ABC):
    """Holds the transformers model by reference; it is no module itself, so nothing is registered twice."""

    model_type: str = ""
    support = Support()
    media_names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw"),
    }  # fmt: skip
    """Of `Prompt.media`: the tensors that must come with tokens of a kind."""
    unread: ClassVar[tuple[str, ...]] = ()
    """How names of parameters begin that no pass reads, and that an engine may lack."""
    engine_names: ClassVar[Mapping[str, str]] = {}
    """Beginnings of names that vLLM knows otherwise than transformers' module tree: as in published checkpoints."""

    def __init__(
        self,
        hf: Any,
        *,
        share_kv: bool = True,
        prefix_checkpointing: bool = False,
        suffix_checkpointing: bool = False,
        prefix_on_host: bool = False,
    ) -> None:
        self.hf = hf
        self.config: Any = hf.config
        self.lora = lora.config_of(hf)
        """peft's LoraConfig where the model has adapters."""
        self.share_kv = share_kv
        self.prefix_checkpointing = prefix_checkpointing
        self.suffix_checkpointing = suffix_checkpointing
        self.prefix_on_host = prefix_on_host
        self.version = 0
        self.before_prefix_backward: Callable[[], None] = lambda: None
        """Set by a strategy whose sharded modules count the calls of one forward and one backward."""
        self.shards: Shards | None = None
        """How this process's parameters are parts of whole ones (tensor parallel); None where they are whole."""
        self._positions: Known = {}
        refuse_unsplittable(hf.config)
        self.hf.set_attn_implementation({"text_config": ATTENTION_NAME})

    # ---- what a family says ----

    @property
    @abstractmethod
    def language_model(self) -> nn.Module:
        """The text model: embeddings in, last hidden states out."""

    @abstractmethod
    def part(self, name: Part) -> list[nn.Module]:
        """The modules of one part."""

    def part_parameters(self, name: Part) -> list[nn.Parameter]:
        """The parameters of one part; the three parts cover all, each once."""
        return [p for module in self.part(name) for p in module.parameters()]

    @abstractmethod
    def compute_positions(self, prompt: Prompt) -> Tensor:
        """(3, P) int64 positions of one prompt, on the CPU; they depend on the config only."""

    @abstractmethod
    def prefix_hidden(
        self, prompts: Sequence[Prompt], positions: Tensor, state: RecordPrefix, features: Mapping[str, Tensor] | None
    ) -> Tensor:
        """Run vision tower and prompt, or the prompt alone with `features` (of `vision_embeddings`) in the place of the
        tower; returns last hidden states (B, P, H)."""

    @abstractmethod
    def vision_embeddings(self, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        """What the vision tower makes of the prompts' media: image_embeds and video_embeds, (vision tokens, W), prompt
        after prompt, on the device; absent when unused. Depends on the tower's weights alone, by one call of the tower
        for each kind (ranks that share sharded parameters must make the same calls)."""

    @abstractmethod
    def blank_media(self, kind: Kind) -> dict[str, Tensor]:
        """The media tensors, as in `Prompt.media`, of the smallest black pictures or video (`models.blank`)."""

    def call_modules_alone(self) -> None:
        """From now on read parameters inside of calls of their own modules only: elsewhere ZeRO-3 has them not."""
        PolicyHead.adopt(self.hf.get_output_embeddings())

    @abstractmethod
    def item_tokens(self, prompt: Prompt, kind: Kind) -> list[int]:
        """How many tokens each picture (or video) of a prompt has, in order."""

    def engine_media(self, prompt: Prompt, features: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
        """The prompt's media on the CPU under the names vLLM reads them by; with `features` (of one prompt, as in
        `vision_embeddings`) in the place of pixels."""
        media = {name: tensor.cpu() for name, tensor in prompt.media.items()}
        if features is None:
            return media
        return {name: t for name, t in media.items() if not name.startswith("pixel_values")} | dict(features)

    @staticmethod
    def engine_refusal(config: Any) -> str | None:
        """What of the model's config vLLM's model of the family does not read, and computes otherwise."""
        return None

    @property
    @abstractmethod
    def banned_token_ids(self) -> tuple[int, ...]:
        """Tokens that stand for vision input; they are outside the policy's support."""

    # ---- shared by all families ----

    @property
    def device(self) -> torch.device:
        return self.head_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head_weight.dtype

    @property
    def head_weight(self) -> Tensor:
        return self.hf.get_output_embeddings().weight

    def banned_mask(self) -> Tensor:
        mask = torch.zeros(self.hf.get_output_embeddings().out_features, dtype=torch.bool, device=self.device)
        mask[list(self.banned_token_ids)] = True
        return mask

    def positions(self, prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor]:
        """(3, B, P) int64 positions and (B,) int64 first response positions, on the CPU.

        The first response token stands one past the largest position of any axis: a picture's positions may exceed, or
        fall short of, its token count.
        """
        positions_3BP = torch.stack([remembered(self._positions, p, self.compute_positions) for p in prompts], dim=1)
        return positions_3BP, positions_3BP.amax(dim=(0, 2)) + 1

    def freeze(self, parts: Sequence[Part]) -> None:
        """Turn gradients off for whole parts, on for the others: for all of them, or for their adapters."""
        trained = {id(p) for n, p in self.hf.named_parameters() if self.lora is None or lora.is_adapter(n)}
        for name in ("vision_tower", "projector", "language_model"):
            for parameter in self.part_parameters(name):
                parameter.requires_grad_(name not in parts and id(parameter) in trained)

    @property
    def vision_parameters(self) -> list[nn.Parameter]:
        """Of all that stands between pixels and what the language model is given of them."""
        return [*self.part_parameters("vision_tower"), *self.part_parameters("projector")]

    @property
    def vision_frozen(self) -> bool:
        return not any(p.requires_grad for p in self.vision_parameters)

    def vision(self, prompts: Sequence[Prompt], *, grad: bool, media: frozenset[str] | None = None) -> VisionState:
        """One pass of the vision tower over a bundle's media, for prefix passes to read. With `grad`, the graph is kept
        for `PrefixState.backward` (unless there is nothing to train in it). media: see `prefix`."""
        frozen = self.vision_frozen
        grad = grad and not frozen
        saved = SavedActivations(self.hf.parameters(), enabled=grad, host=self.prefix_on_host)
        with (
            torch.set_grad_enabled(grad),
            saved,
            self._checkpointing(grad and self.prefix_checkpointing, "vision_tower"),
        ):
            live = vision_embeddings(self, prompts, media)
        return VisionState(
            live=live, tokens={name: feature_tokens(prompts, name) for name in live}, version=self.version,
            frozen=frozen, saved_bytes=saved.besides(list(live.values())), host_bytes=saved.host_bytes,
        )  # fmt: skip

    def prefix(
        self, prompts: Sequence[Prompt], *, grad: bool, media: frozenset[str] | None = None,
        vision: VisionState | None = None,
    ) -> PrefixState:  # fmt: skip
        """One prefix pass over a bundle. With `grad`, the graph is kept for `PrefixState.backward`.

        media: what is run depends on these names of pixel tensors alone, the prompts' among them (`models.blank`); None
        runs what the prompts need.
        vision: what `vision` of a model with the same tower gave for these prompts; the tower is not run then. To train
        a tower its graph must be behind it.
        """
        lengths = {len(p) for p in prompts}
        assert len(lengths) == 1, f"a bundle's prompts must have one length, got {sorted(lengths)}"
        if vision is not None:
            vision.check_version(self.version)
            vision.check_prompts(prompts)
            whole = vision.has_graph or self.vision_frozen or not vision.leaves
            assert whole or not grad, "features without their graph: the tower would get no gradient"
        positions, next_position_B = self.positions(prompts)
        state = RecordPrefix()
        saved = SavedActivations(self.hf.parameters(), enabled=grad, host=self.prefix_on_host)
        with (
            torch.set_grad_enabled(grad),
            saved,
            self._checkpointing(grad and self.prefix_checkpointing, "language_model", "vision_tower"),
        ):
            features = None if vision is None else vision.leaves
            if media is not None:
                features = vision_embeddings(self, prompts, media)
            hidden_BPH = self.prefix_hidden(prompts, positions.to(self.device), state, features)
            live = [t for layer in sorted(state.kv) for t in state.kv[layer]]
            live.append(hidden_BPH[:, -1].clone())  # a view would keep all P rows alive
        next_position_B = next_position_B.to(self.device)
        return PrefixState(
            live=live, next_position_B=next_position_B, version=self.version, saved_bytes=saved.besides(live),
            host_bytes=saved.host_bytes, vision=vision if vision is not None and vision.has_graph and grad else None,
        )  # fmt: skip

    def suffix(
        self, prefix: PrefixState, ids_NR: Tensor, lengths_N: Tensor, *, temperature: float, grad: bool
    ) -> SuffixOutput:
        """Log-probabilities of N = B*G responses (rows of a prompt adjacent) given their bundle's prefix.

        ids_NR int64 right-padded with any valid id; lengths_N int64, 0 allowed. Gradients stop at the prefix's leaves.
        """
        prefix.check_version(self.version)
        n, r = ids_NR.shape
        ids_NR, lengths_N = ids_NR.to(self.device), lengths_N.to(self.device)
        banned_V = self.banned_mask()
        mask_NR = (torch.arange(r, device=self.device) < lengths_N[:, None]) & ~banned_V[ids_NR]
        saved = SavedActivations(self.hf.parameters(), enabled=grad)
        checkpointing = self._checkpointing(grad and self.suffix_checkpointing, "language_model")
        with torch.set_grad_enabled(grad), saved, checkpointing:
            hidden_NRH = prefix.last_hidden_BH.repeat_interleave(n // prefix.batch, dim=0).unsqueeze(1)
            if r > 1:
                own_NTH = self._suffix_hidden(prefix, ids_NR[:, : r - 1])
                hidden_NRH = torch.cat([hidden_NRH, own_NTH], dim=1)
            hidden_MH, target_M = hidden_NRH[mask_NR], ids_NR[mask_NR]
            logps_M, entropy_M = self._logps(hidden_MH, target_M, temperature, banned_V)
            zeros_NR = torch.zeros(n, r, dtype=logps_M.dtype, device=self.device)
            logps_NR = zeros_NR.masked_scatter(mask_NR, logps_M)
            entropy_NR = zeros_NR.masked_scatter(mask_NR, entropy_M)
        return SuffixOutput(
            logps_NR=logps_NR, entropy_NR=entropy_NR, mask_NR=mask_NR, saved_bytes=saved.besides(prefix.leaves)
        )

    def _logps(
        self, hidden_MH: Tensor, target_M: Tensor, temperature: float, banned_V: Tensor
    ) -> tuple[Tensor, Tensor]:
        head = self.hf.get_output_embeddings()
        if isinstance(head, PolicyHead):
            return head(hidden_MH, target_M, temperature=temperature, banned_V=banned_V)
        return linear_logps(hidden_MH, head.weight, target_M, temperature=temperature, banned_V=banned_V)

    def _suffix_hidden(self, prefix: PrefixState, ids_NT: Tensor) -> Tensor:
        n, t = ids_NT.shape
        start_N = prefix.next_position_B.repeat_interleave(n // prefix.batch)
        position_NT = start_N[:, None] + torch.arange(t, device=self.device)
        state = ReadPrefix(prefix.kv(), shared=self.share_kv)
        return self.run_text(self.embed(ids_NT), position_NT.expand(3, n, t), state)

    def embed(self, ids: Tensor) -> Tensor:
        return self.hf.get_input_embeddings()(ids)

    def run_text(self, embeds_NTH: Tensor, positions_3NT: Tensor, state: Any) -> Tensor:
        """The text model over embeddings with explicit positions; `state` decides what attention does."""
        out = self.language_model(
            inputs_embeds=embeds_NTH, position_ids=positions_3NT, use_cache=False, **{STATE_KEYWORD: state}
        )
        return out.last_hidden_state

    # ---- activation checkpointing, per pass ----

    def _checkpointing(self, enabled: bool, *parts: Part) -> Checkpointing:
        return Checkpointing([m for p in parts for m in self.part(p)], enabled)

    # ---- a second module tree on the same tensors ----

    def alias(self) -> SplitModel:
        """A module tree of its own whose parameters are this model's tensors: no second copy of any weight.

        The engine decodes on it in another thread: training flags, checkpointing flags and rope state are not shared.
        """
        return self.twin(lambda parameter: parameter.detach())

    def without_adapters(self) -> SplitModel:
        """As `alias`, but what the model was before it had adapters: the reference, without weights of its own."""
        return self.twin(lambda parameter: parameter.detach(), adapters=False)

    def twin(self, tensor_of: Callable[[nn.Parameter], Tensor], *, adapters: bool = True) -> SplitModel:
        """As `alias`, with the tensors that `tensor_of` gives for this model's parameters."""
        hf = empty_tree(self.hf, self.lora if adapters else None)
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.hf, twin.config, twin.lora = hf, hf.config, lora.config_of(hf)
        twin.hf.set_attn_implementation({"text_config": ATTENTION_NAME})
        twin.prefix_checkpointing = twin.suffix_checkpointing = False
        twin.bind(self, tensor_of)
        return twin

    def bind(
        self, source: SplitModel, tensor_of: Callable[[nn.Parameter], Tensor] = lambda parameter: parameter.detach()
    ) -> None:
        """(Re-)point every parameter at `source`'s storage; needed again whenever the trainer re-allocates one."""
        point_at(self.hf, source.hf, tensor_of)
        self.version = source.version

    def shares_storage_with(self, source: SplitModel) -> bool:
        """True when every parameter still lies at the source's address."""
        return same_storage(self.hf, source.hf)
