"""Samples for the page: texts made printable, pictures as small data URIs."""

from __future__ import annotations

import base64
import io
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from rollplex.reports.charts import number
from rollplex.reports.run_files import SampleSet

TEXT_LIMIT = 4000
"""Characters shown of a prompt or response."""
MOST = 16
"""Pictures and responses shown of a sample."""


@dataclass(frozen=True)
class ResponseView:
    text: str
    reward: str
    parts: str
    tokens: str
    ended: str


@dataclass(frozen=True)
class SampleView:
    title: str
    prompt: str
    pictures: tuple[str, ...]
    """data URIs."""
    lost: int
    """Pictures that could not be read."""
    responses: tuple[ResponseView, ...]
    facts: tuple[tuple[str, str], ...] = ()
    """The right answer, or what else the row holds; empty in files of older runs."""
    left: tuple[str, ...] = ()
    """Of what there is more than is shown, and how much."""


def sample_views(sets: Sequence[SampleSet], limit: int, side: int) -> list[tuple[str, list[SampleView]]]:
    """(heading, samples) of each set, at most `limit` samples of each. side: longest side of a picture, in pixels."""
    out = []
    for one in sets:
        split = {"train": "training", "val": "validation"}.get(one.split, one.split)
        views = [_view(record, one.folder, side) for record in one.records[:limit]]
        if views:
            out.append((f"After rollout batch {one.step}, {split}", views))
    return out


def _view(record: Mapping[str, Any], folder: Path, side: int) -> SampleView:
    names = record.get("images") if isinstance(record.get("images"), list) else []
    names, said = names or [], [r for r in record["responses"] if isinstance(r, Mapping)]
    pictures = [thumbnail(folder, str(name), side) for name in names[:MOST]]
    left = [f"{len(x) - MOST} more {what}" for x, what in ((names, "pictures"), (said, "responses")) if len(x) > MOST]
    return SampleView(
        printable(str(record.get("id", ""))), printable(str(record.get("prompt", ""))),
        tuple(p for p in pictures if p is not None), sum(p is None for p in pictures),
        tuple(map(_response, said[:MOST])), _facts(record), tuple(left),
    )  # fmt: skip


def _facts(record: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    if record.get("answer") is not None:
        return (("right answer", printable(str(record["answer"]))),)
    columns = record.get("columns")
    named = columns.items() if isinstance(columns, Mapping) else ()
    return tuple((printable(name), printable(str(value))) for name, value in named)[:MOST]


def _response(record: Mapping[str, Any]) -> ResponseView:
    reward, parts = record.get("reward"), record.get("components")
    named = parts if isinstance(parts, Mapping) else {}
    told = ", ".join(f"{name} {_number(value)}" for name, value in named.items())
    ended = {"stop": "ended", "length": "cut off", "abort": "aborted"}.get(str(record.get("finish_reason")), "")
    return ResponseView(
        printable(str(record.get("text", ""))),
        _number(reward),
        printable(told),
        printable(str(record.get("tokens", ""))),
        ended,
    )


def _number(value: Any) -> str:
    try:
        return number(float(value), 3) if isinstance(value, int | float) else "missing"
    except OverflowError:
        return "missing"


def printable(text: str) -> str:
    r"""Control characters as \x13, lone surrogates replaced, long text cut."""
    cut = text if len(text) <= TEXT_LIMIT else f"{text[:TEXT_LIMIT]} ... ({len(text) - TEXT_LIMIT:,} characters more)"
    cut = cut.encode("utf-8", "replace").decode()
    return "".join(f"\\x{ord(c):02x}" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in cut)


def thumbnail(folder: Path, name: str, side: int) -> str | None:
    """A picture beside the samples as a data URI of at most side by side pixels; None if it cannot be read, or if the
    name leads out of the folder."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        return None
    try:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
            image.thumbnail((side, side))
            buffer = io.BytesIO()
            # Small pictures exactly; large ones would make the page heavy as PNG.
            kind = "PNG" if max(image.size) <= 128 else "JPEG"
            image.save(buffer, format=kind, **({} if kind == "PNG" else {"quality": 85}))
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
