"""Writing files that a crash cannot damage and that never replace an earlier run's."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def free_path(path: Path) -> Path:
    """`path`, or when it is taken the first free of name-v1.ext, name-v2.ext, ..."""
    candidate, version = path, 0
    while candidate.exists():
        version += 1
        candidate = path.with_name(f"{path.stem}-v{version}{path.suffix}")
    return candidate


def check_folder(owner: str, path: Path) -> None:
    """Make the folder that `owner` will write to, before hours of training; ValueError when that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{owner}: dirpath={str(path)!r} is no folder to write to ({error}); set another") from error


def append_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append one line a record, all in one write: a reader or a crash sees every line whole. NaN becomes null."""
    data = "".join(json.dumps(_plain(record), ensure_ascii=False, allow_nan=False) + "\n" for record in records).encode(
        errors="replace"
    )  # half a surrogate pair is no text
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        written = os.write(file, data)
        while written < len(data):
            written += os.write(file, data[written:])
        os.fsync(file)
    finally:
        os.close(file)


def write_whole(path: Path, data: bytes) -> None:
    """Write beside the target, then rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    """JSON has no NaN: a missing reward is null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
