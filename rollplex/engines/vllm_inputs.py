"""From our requests to vLLM's: prompt ids and pixels as the HF processor gave them, every sampling parameter said.

Shape legend: P prompt tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rollplex.data.records import Prompt, Request, SamplingParams
from rollplex.engines import vllm_patches
from rollplex.engines.sampling import check_request
from rollplex.models.split_model import Kind, SplitModel
from rollplex.models.vision import VisionState

MODALITIES: tuple[tuple[Kind, int], ...] = (("image", 1), ("video", 2))
"""Name, value in mm_token_type_ids."""

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0
"""vLLM raises lower ones (other than 0) silently, and refuses higher ones."""


def check_temperature(params: SamplingParams) -> None:
    t = params.temperature
    if t != 0 and not LOWEST_TEMPERATURE <= t <= HIGHEST_TEMPERATURE:
        raise ValueError(
            f"temperature={t} cannot be sampled with by vLLM: set 0 (greedy) or {LOWEST_TEMPERATURE} to "
            f"{HIGHEST_TEMPERATURE}"
        )


def embeds_arguments(source: SplitModel) -> dict[str, Any]:
    """Of vLLM's EngineArgs, for one that gets features: with a limit of 0 it builds no vision tower."""
    limits = {"limit_mm_per_prompt": {"image": 0, "video": 0}} if source.support.towerless else {}
    return {"enable_mm_embeds": True} | limits


def sampling_params(params: SamplingParams, seed: int, always_banned: Iterable[int]) -> Any:
    """vLLM's parameters of one response.

    Nothing is left to the checkpoint's generation_config. Stop strings are ours to find: vLLM's own search knows other
    rules (special tokens, broken UTF-8).
    """
    import vllm
    from vllm.sampling_params import RequestOutputKind

    banned = {token: float("-inf") for token in (*always_banned, *params.banned_token_ids)}
    return vllm.SamplingParams(
        n=1,
        max_tokens=params.max_tokens,
        min_tokens=0,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        seed=seed & (2**63 - 1),  # -1 would mean no seed
        stop=None,
        stop_token_ids=list(params.stop_token_ids),
        ignore_eos=True,  # the end token is among stop_token_ids
        bad_words=None,
        logit_bias=banned or None,
        allowed_token_ids=None,
        logprobs=0,  # of the sampled token alone
        prompt_logprobs=None,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


class PromptConverter:
    """Prompts as vLLM's inputs; those of one submission are converted once for all their responses."""

    def __init__(self, vllm_config: Any, source: SplitModel, *, embed: bool) -> None:
        """source: the trainer's model. embed: vLLM gets what its vision tower makes of pixels: the features that come
        with a request, or of a pass of our own (in evaluation, where nothing else needs them)."""
        from vllm.multimodal import MULTIMODAL_REGISTRY

        self._fields = MULTIMODAL_REGISTRY.create_processor(vllm_config.model_config)._get_mm_fields_config
        self._uses_mrope = vllm_config.model_config.uses_mrope
        self._source = source
        # The tower runs on the rollout lane: on a module tree of its own over the trainer's tensors.
        self._tower = source.alias() if embed else None
        self._by_item = embed and source.support.features_by_item
        self._positions: dict[tuple[Any, ...], tuple[Tensor, int]] = {}

    def attach(self, model: Any) -> None:
        """Let vLLM's model take what is converted here."""
        if self._uses_mrope:
            vllm_patches.use_positions(model, self.positions)
        if self._by_item:
            vllm_patches.take_features(model)

    def convert(self, prompt: Prompt, features: VisionState | None = None) -> Any:
        """A text or multimodal input whose token ids are the prompt's own, unexpanded and untokenised by vLLM.

        features: of this prompt alone, under the weights that sample.
        """
        from vllm.inputs import mm_input, tokens_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        ids = prompt.input_ids.tolist()
        if not prompt.media:
            return tokens_input(prompt_token_ids=ids)
        media = self._media(prompt, features)
        items = MultiModalKwargsItems.from_hf_inputs(media, self._fields_of(media))
        places: dict[str, Any] = {
            modality: [
                PlaceholderRange(offset=first, length=end - first, is_embed=is_embed)
                for first, end, is_embed in item_places(prompt, code, sizes)
            ]
            for modality, code in MODALITIES
            if (sizes := self._source.item_tokens(prompt, modality))
        }
        hashes: dict[str, list[str]] = {
            modality: [_hash(modality, item) for item in items[modality]] for modality in places
        }
        where = [(p.offset, h) for modality in places for p, h in zip(places[modality], hashes[modality], strict=True)]
        positions_31P, next_position_1 = self._source.positions([prompt])
        self._positions[_layout(len(ids), where)] = (positions_31P[:, 0], int(next_position_1) - len(ids))
        return mm_input(prompt_token_ids=ids, mm_kwargs=items, mm_hashes=hashes, mm_placeholders=places)

    def _fields_of(self, media: Any) -> Any:
        """How each of `media` is made of items."""
        from vllm.multimodal.inputs import MultiModalFieldConfig

        if not self._by_item:
            return self._fields(media, {})
        return {name: MultiModalFieldConfig.batched(name.removesuffix("_embeds")) for name in media}

    def _media(self, prompt: Prompt, features: VisionState | None) -> Any:
        source = self._source
        if self._tower is None:
            return source.engine_media(prompt)
        if features is None:
            if not self._tower.shares_storage_with(self._source):
                self._tower.bind(self._source)
            features = self._tower.vision([prompt], grad=False)
        features.check_prompts([prompt])
        return source.engine_media(prompt, features.leaves)

    def positions(self, input_tokens: Sequence[int], mm_features: Sequence[Any]) -> tuple[Tensor, int]:
        """(3, P) int64 positions of a converted prompt, and first response position minus P: the trainer's.

        In the place of the `get_mrope_input_positions` of vLLM's model (see `vllm_patches.use_positions`).
        """
        n = len(input_tokens)
        if not mm_features:
            return torch.arange(n).expand(3, n), 0
        return self._positions[_layout(n, [(f.mm_position.offset, f.mm_hash) for f in mm_features])]

    def forget(self) -> None:
        """Drop the positions of all prompts; none of them is in use."""
        self._positions.clear()


def _layout(tokens: int, items: Iterable[tuple[int, str]]) -> tuple[Any, ...]:
    """What decides a prompt's positions: its length, and where which picture or video (by its hash) stands."""
    return (tokens, *sorted(items))


def check_length(request: Request, limit: int, source: SplitModel) -> None:
    """Raises ValueError, naming the row and what to set, for a request that can never run.

    limit: most tokens of a sequence; source: the trainer's model.
    """
    exceeded = f"the engine's max_model_len of {limit}: raise it (up to the model's context),"
    check_request(request, source.media_names, limit, exceeded)


def check_media_sizes(prompt: Prompt, encoder_tokens: int, source: SplitModel) -> None:
    """Raises ValueError for a picture or video of more than `encoder_tokens` tokens."""
    largest = max((n for kind, _ in MODALITIES for n in source.item_tokens(prompt, kind)), default=0)
    if largest > encoder_tokens:
        raise ValueError(
            f"row {prompt.sample.id!r}: a picture or video of {largest} tokens does not fit the engine's encoder cache "
            f"of {encoder_tokens}: raise the engine's max_num_batched_tokens or use smaller images"
        )


def item_places(prompt: Prompt, code: int, sizes: Sequence[int]) -> list[tuple[int, int, Tensor | None]]:
    """(first token, one past the last, mask) of each picture or video, of `sizes` tokens. The mask (bool, over the
    range) marks its own tokens where text stands between them (time stamps, in some families); None when all are."""
    is_own_P = prompt.mm_token_type_ids == code
    own = torch.nonzero(is_own_P).squeeze(1).tolist()
    places, used = [], 0
    for count in sizes:
        tokens = own[used : used + count]
        if len(tokens) != count:
            break
        first, end = tokens[0], tokens[-1] + 1
        mask = is_own_P[first:end]
        places.append((first, end, None if bool(mask.all()) else mask.clone()))
        used += count
    if used != len(own) or len(places) != len(sizes):
        raise ValueError(
            f"row {prompt.sample.id!r}: {len(own)} placeholder tokens do not match its media, whose pictures or videos "
            f"have {list(sizes)} tokens"
        )
    return places


def _hash(modality: str, item: Any) -> str:
    """Of an item's content: equal pictures share the engine's caches, whatever prompt they stand in."""
    digest = hashlib.blake2b(modality.encode(), digest_size=16)
    for name in sorted(item):
        tensor = item[name].data
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
