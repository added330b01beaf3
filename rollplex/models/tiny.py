"""Tiny vision-language models built locally, for the quickstart and the tests: nothing is downloaded.

Everything is the real thing, only small: the transformers model class of the family, its real processor (image and
video), and a byte-level tokenizer with the family's special tokens and chat format. A folder written here loads with
plain `AutoModelForImageTextToText.from_pretrained` and `AutoProcessor.from_pretrained`, and with vLLM.

Command line: `python -m rollplex.models.tiny --out models/tiny-digits`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rollplex.models.byte_tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, TOKEN_IDS
from rollplex.models.tiny_families import FAMILIES

MARKER = "rollplex_tiny.json"
HEAD_DIMS = (32, 64)
EMBEDDING_STD = 0.02
"""Of token embeddings and output head for learning: small enough that a fresh model tries every token alike. At 0.035 a
few answers lead from the start, and GRPO settles on one of them before it has read a picture."""


@dataclass(frozen=True)
class TinySettings:
    """Everything that decides what a tiny model is; two equal settings give two equal folders."""

    family: str = "qwen2_5_vl"
    """A key of `FAMILIES`."""

    seed: int = 0
    hidden_size: int = 128
    """Width of the text model. hidden_size / heads must be 32 or 64 (vLLM's CPU kernels take no less)."""

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    intermediate_size: int = 384
    vision_hidden: int = 128
    vision_depth: int = 2
    """The last block sees the whole picture, the others windows of 112 pixels."""

    vision_heads: int = 4
    vision_intermediate: int = 256
    tie_word_embeddings: bool = True
    attention_dropout: float = 0.0
    min_pixels: int = 4 * 28 * 28
    """Smallest picture (in pixels) the processor keeps; smaller ones are enlarged. Frames of videos too."""

    max_pixels: int = 1280 * 28 * 28
    init_std: float | None = None
    """None: for learning (see `_init_for_learning`). A number: every matrix is drawn with this standard deviation and
    no bias or norm is left at a neutral value, so no gradient is zero or hidden by construction (parity tests: 0.1)."""

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"unknown tiny family {self.family!r}; known: {', '.join(sorted(FAMILIES))}")
        if self.hidden_size % self.heads or self.hidden_size // self.heads not in HEAD_DIMS:
            raise ValueError(
                f"hidden_size={self.hidden_size} with heads={self.heads} gives a head size of "
                f"{self.hidden_size / self.heads:g}; it must be one of {HEAD_DIMS} (set hidden_size = heads * 32)"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.vision_hidden % (4 * self.vision_heads):
            raise ValueError(
                f"vision_hidden={self.vision_hidden} must be a multiple of 4 * vision_heads={4 * self.vision_heads}: "
                "two-dimensional rotary positions need a head size divisible by 4"
            )

    def digest(self) -> str:
        """Hash of the settings and of what this file writes besides them."""
        what = [asdict(self), CHAT_TEMPLATE, SPECIAL_TOKENS, EMBEDDING_STD, "format 1"]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def tiny_config(**settings: Any) -> Any:
    """The transformers config of a tiny model; keyword arguments are the fields of `TinySettings`."""
    chosen = TinySettings(**settings)
    return FAMILIES[chosen.family].config(chosen)


def processor_of(settings: TinySettings) -> Any:
    """The real processor of the settings' family, with the byte-level tokenizer."""
    return FAMILIES[settings.family].processor(settings)


def build_tiny_in_memory(**settings: Any) -> tuple[Any, Any]:
    """A tiny float32 model (in train mode) and its processor, nothing written.

    Keyword arguments are the fields of `TinySettings`. The same settings always give the same weights; global random
    states are left as they were.
    """
    chosen = TinySettings(**settings)
    return _build(chosen)


def build_tiny(out_dir: str | Path, **settings: Any) -> Path:
    """Write a tiny model and its processor to `out_dir` and return the folder.

    Keyword arguments are the fields of `TinySettings`. A folder that holds the same settings already is kept as it is;
    an older tiny model is replaced in one rename; any other folder is an error. An interrupted build leaves nothing.
    """
    chosen = TinySettings(**settings)
    out = Path(out_dir)
    if out.exists():
        if _digest_of(out) == chosen.digest():
            return out
        if _digest_of(out) is None and any(out.iterdir()):
            raise FileExistsError(f"{out} exists and was not written by rollplex.models.tiny: choose another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    model, processor = _build(chosen)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        work.chmod(0o755)
        model.save_pretrained(work)
        processor.save_pretrained(work)
        marker = {"digest": chosen.digest(), "settings": asdict(chosen)}
        (work / MARKER).write_text(json.dumps(marker, indent=1) + "\n")
        if out.exists():
            shutil.rmtree(out)
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out


def _digest_of(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / MARKER).read_text())["digest"])
    except (OSError, ValueError, KeyError):
        return None


def _build(settings: TinySettings) -> tuple[Any, Any]:
    family = FAMILIES[settings.family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = family.model_class()(family.config(settings)).float()
    generator = torch.Generator().manual_seed(settings.seed)
    if settings.init_std is None:
        _init_for_learning(model, generator)
    else:
        _init_for_parity(model, settings.init_std, generator)
    end = TOKEN_IDS["<|im_end|>"]
    model.generation_config.eos_token_id = end
    model.generation_config.pad_token_id = TOKEN_IDS["<|endoftext|>"]
    return model.train(), family.processor(settings)


@torch.no_grad()
def _init_for_learning(model: nn.Module, generator: torch.Generator) -> None:
    """Matrices keep the scale of what passes through (variance 1 / fan-in); biases 0, norms 1.

    The output head is small enough that a fresh model tries every token.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim >= 2:
                fan_in = math.prod(parameter.shape[1:])
                std = EMBEDDING_STD if isinstance(module, nn.Embedding) else fan_in**-0.5
                parameter.normal_(0.0, std, generator=generator)
            else:
                parameter.fill_(0.0 if name == "bias" else 1.0)
    _retie(model, EMBEDDING_STD, generator)


@torch.no_grad()
def _init_for_parity(model: nn.Module, std: float, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        centre = 1.0 if parameter.ndim == 1 and not name.endswith("bias") else 0.0
        parameter.normal_(0.0, std, generator=generator).add_(centre)


def _retie(model: nn.Module, std: float, generator: torch.Generator) -> None:
    """The output head starts as small as the embeddings, tied or not (tied: it is the same parameter)."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    head.weight.normal_(0.0, std, generator=generator)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: `--out FOLDER` and one option for each field of `TinySettings`."""
    parser = argparse.ArgumentParser(prog="python -m rollplex.models.tiny", description="Build a tiny local model.")
    parser.add_argument("--out", required=True, help="folder to write; kept when it holds the same model already")
    for field in fields(TinySettings):
        name = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=field.default)
        else:
            kind = float if field.name in ("init_std", "attention_dropout") else type(field.default)
            parser.add_argument(name, type=kind, default=field.default)
    options = vars(parser.parse_args(arguments))
    out = Path(options.pop("out"))
    try:
        kept = _digest_of(out) == TinySettings(**options).digest()
        build_tiny(out, **options)
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    print(f"{out}: {'already there' if kept else 'written'}")


if __name__ == "__main__":
    main()
