"""Rows of files and folders, each read when it is asked for.

| source | rows |
|---|---|
| `.jsonl` | one JSON object a line |
| `.json` | an array of objects; held in memory |
| `.parquet` | read by row groups, of which the last few stay in memory (needs pyarrow) |
| a folder that `Dataset.save_to_disk` wrote | memory-mapped (needs datasets) |
| a folder of pictures and videos | `{"image" or "video": path}`, with the name of the folder around it as `label`; or the rows of its `metadata.jsonl` / `metadata.csv`, by their `file_name` |

No code of a dataset runs: there is no loading script, no pickle, and nothing is decoded here.
"""  # noqa: E501

from __future__ import annotations

import csv
import glob
import importlib
import json
import os
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

Format = Literal["auto", "jsonl", "json", "parquet", "hf", "folder"]

MAX_ROW_BYTES = 256 << 20
"""Longest line of a JSONL file that is read. A longer one is a bad row."""

MAX_JSON_BYTES = 1 << 30
"""Largest .json file: unlike JSONL it is held in memory."""

MAX_GROUP_BYTES = 2 << 30
"""Largest row group of a Parquet file, uncompressed: one is read as a whole for any of its rows."""

CACHE_BYTES = 256 << 20
"""Row groups that a process keeps (the last one always)."""

IMAGES = {".avif", ".bmp", ".gif", ".jp2", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
VIDEOS = {".avi", ".flv", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".ogv", ".ts", ".webm", ".wmv"}


class Rows(Sequence[dict[str, Any]]):
    """Rows of one file or folder. A row that cannot be read raises when it is asked for, not before."""

    path: Path

    @property
    def folder(self) -> Path:
        """What paths in the rows are relative to."""
        return self.path if self.path.is_dir() else self.path.parent

    def place(self, number: int) -> str:
        """Where people find a row, such as "line 12"; "" where its number says it."""
        return ""

    def __getitem__(self, number: Any) -> Any:
        row = self.read(int(number))
        if not isinstance(row, dict):
            raise ValueError(f"a row must be an object with named fields, not {type(row).__name__}")
        return row

    def read(self, number: int) -> Any:
        raise NotImplementedError


class JsonLines(Rows):
    """Only the places of the lines are in memory. Blank lines are no rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._starts, self._ends, self._lines = array("Q"), array("Q"), array("Q")
        start, position, blank, line = 0, 0, True, 1
        with open(path, "rb") as file:
            while piece := file.readline(1 << 20):
                position += len(piece)
                blank = blank and piece.isspace()
                if piece.endswith(b"\n"):
                    self._add(start, position, line, blank)
                    start, blank, line = position, True, line + 1
        self._add(start, position, line, blank)

    def _add(self, start: int, end: int, line: int, blank: bool) -> None:
        if not blank:
            self._starts.append(start)
            self._ends.append(end)
            self._lines.append(line)

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, number: int) -> Any:
        start, end = self._starts[number], self._ends[number]
        if end - start > MAX_ROW_BYTES:
            raise ValueError(f"its line has {end - start} bytes; at most {MAX_ROW_BYTES} are read")
        with open(self.path, "rb") as file:  # opened each time: processes must not share a position in the file
            file.seek(start)
            content = file.read(end - start)
        try:
            return json.loads(content)
        except json.JSONDecodeError as error:
            raise ValueError(f"no valid JSON at column {error.pos + 1}: {error.msg}") from error

    def place(self, number: int) -> str:
        return f"line {self._lines[number]}"


class MetadataLines(JsonLines):
    """The metadata.jsonl of a folder of pictures and videos."""

    def read(self, number: int) -> Any:
        return _with_media(super().read(number))


class InMemory(Rows):
    """Rows that are there already: of a .json array, a folder or a metadata file."""

    def __init__(self, path: Path, rows: Sequence[Any]) -> None:
        self.path, self._rows = path, rows

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, number: int) -> Any:
        return self._rows[number]


class ParquetRows(Rows):
    """Row groups are read whole; the last ones stay, up to `CACHE_BYTES`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        metadata = need("pyarrow.parquet", "data", f"reading {path.name}").read_metadata(path)
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        for i, group in enumerate(groups):
            if group.total_byte_size > MAX_GROUP_BYTES:
                raise ValueError(
                    f"{path}: row group {i} has {group.total_byte_size >> 20} MiB, at most {MAX_GROUP_BYTES >> 20} are "
                    "read at a time; write the file with a smaller row_group_size"
                )
        self._groups = Offsets([group.num_rows for group in groups])
        self._tables: OrderedDict[int, Any] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tables": OrderedDict()}

    def __len__(self) -> int:
        return self._groups.total

    def read(self, number: int) -> Any:
        group, row = self._groups.find(number)
        return self._table(group).slice(row, 1).to_pylist()[0]

    def _table(self, group: int) -> Any:
        if group not in self._tables:
            file = need("pyarrow.parquet", "data", f"reading {self.path.name}").ParquetFile(self.path, memory_map=True)
            # No threads of pyarrow's own: in a forked worker they would wait for ever.
            self._tables[group] = file.read_row_group(group, use_threads=False)
        self._tables.move_to_end(group)
        while len(self._tables) > 1 and sum(table.nbytes for table in self._tables.values()) > CACHE_BYTES:
            self._tables.popitem(last=False)
        return self._tables[group]


class SavedDataset(Rows):
    """A split that `datasets.Dataset.save_to_disk` wrote. Pictures stay as they are stored: {"bytes", "path"}."""

    def __init__(self, path: Path) -> None:
        self.path = path
        datasets = need("datasets", "data", f"reading {path}")
        self._data = datasets.load_from_disk(str(path)).with_format("arrow")

    def __len__(self) -> int:
        return len(self._data)

    def read(self, number: int) -> Any:
        return self._data[number].to_pylist()[0]


def open_rows(path: str | Path | Sequence[str | Path], format: Format = "auto") -> list[Rows]:
    """The sources that `path` names: a file, a folder, a pattern with *, ? or [, or a list of these, in that order.

    Raises ValueError, naming the path, for what does not exist, is empty, is no known format or needs a package that is
    not installed.
    """
    if format not in get_args(Format):
        raise ValueError(f"format={format!r} is unknown; set one of {', '.join(get_args(Format))}")
    check_paths("path", path)
    paths = [Path(p) for one in ([path] if isinstance(path, str | Path) else path) for p in _matches(str(one))]
    sources = [_open(p, format) for p in paths]
    names = [source.path.resolve() for source in sources]
    if twice := sorted({str(name) for name in names if names.count(name) > 1}):
        raise ValueError(f"path names {', '.join(twice)} twice")
    for source in sources:
        if not len(source):
            raise ValueError(f"{source.path} has no rows")
    return sources


def check_paths(setting: str, path: Any) -> None:
    """Raises ValueError, naming the setting, for what is neither a path nor a list of one or more."""
    paths = path if isinstance(path, list | tuple) else [path]
    if not paths or any(not isinstance(one, str | Path) or not str(one).strip() for one in paths):
        raise ValueError(f"{setting}={path!r} must name a file or a folder, or be a list of one or more such names")


class Offsets:
    """Where the parts of a concatenation begin."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._ends = array("Q")
        self.total = 0
        for length in lengths:
            self.total += length
            self._ends.append(self.total)

    def find(self, number: int) -> tuple[int, int]:
        """(part, number within it). IndexError beyond the last."""
        if not 0 <= number < self.total:
            raise IndexError(number)
        part = bisect_right(self._ends, number)
        return part, number - (self._ends[part - 1] if part else 0)


def need(module: str, extra: str, what: str) -> Any:
    """Import an optional package; ValueError that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0].replace("_", "-")
        raise ValueError(f"{what} needs {package}: pip install 'rollplex[{extra}]' ({error})") from error


def _matches(pattern: str) -> list[str]:
    if Path(pattern).exists() or not glob.has_magic(pattern):
        return [pattern]
    found = sorted(glob.glob(pattern))
    if not found:
        raise ValueError(f"no file matches path={pattern!r}")
    return found


def _open(path: Path, format: Format) -> Rows:
    if not path.exists():
        raise ValueError(f"path={str(path)!r} does not exist (looked from {os.getcwd()})")
    chosen = _guess(path) if format == "auto" else format
    wants_folder = chosen in ("hf", "folder")
    if wants_folder != path.is_dir():
        raise ValueError(f"format={chosen} needs a {'folder' if wants_folder else 'file'}, and {path} is none")
    try:
        return _READERS[chosen](path)
    except Exception as error:
        if type(error) is ValueError:  # one of ours; pyarrow's and json's are kinds of it
            raise
        raise ValueError(f"{path} cannot be read as {chosen}: {type(error).__name__}: {error}") from error


def _guess(path: Path) -> Format:
    if path.is_dir():
        return "hf" if (path / "state.json").exists() or (path / "dataset_dict.json").exists() else "folder"
    formats: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet"}
    if path.suffix.lower() not in formats:
        raise ValueError(f"{path}: cannot tell what {path.suffix or 'a file without an ending'} is; set format")
    return formats[path.suffix.lower()]


def _json_array(path: Path) -> Rows:
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise ValueError(f"{path} has {size >> 20} MiB, at most {MAX_JSON_BYTES >> 20} fit; write it as JSONL")
    rows = json.loads(path.read_bytes())
    if not isinstance(rows, list):
        raise ValueError(f"{path} holds {type(rows).__name__}; a .json file must hold an array of objects")
    return InMemory(path, rows)


def _saved(path: Path) -> Rows:
    splits = path / "dataset_dict.json"
    if splits.exists():
        names = json.loads(splits.read_text()).get("splits", [])
        raise ValueError(f"{path} holds several splits; name one: {', '.join(str(path / name) for name in names)}")
    return SavedDataset(path)


def _folder(path: Path) -> Rows:
    if (path / "metadata.jsonl").exists():
        return MetadataLines(path / "metadata.jsonl")
    if (path / "metadata.csv").exists():
        with open(path / "metadata.csv", newline="", encoding="utf-8-sig") as file:
            return InMemory(path, [_with_media(row) for row in csv.DictReader(file, restkey="", restval=None)])
    rows = [_media_row(file, path) for file in _files(path) if file.suffix.lower() in IMAGES | VIDEOS]
    if not rows and (found := [*path.glob("*.parquet"), *path.glob("*/*.parquet"), *path.glob("*.jsonl")]):
        raise ValueError(f"{path} holds no pictures or videos, but {found[0].name}: name files, e.g. {found[0]}")
    return InMemory(path, rows)


def _with_media(row: Any) -> Any:
    """`file_name` (or a list, `file_names`) of a metadata row becomes what it names."""
    if not isinstance(row, dict):
        return row
    kept = {name: value for name, value in row.items() if name not in ("file_name", "file_names")}
    given = row.get("file_names", row.get("file_name"))
    names = given if isinstance(given, list) else [given]
    kinds = {"video" if Path(str(name)).suffix.lower() in VIDEOS else "image" for name in names if name}
    if len(kinds) > 1:
        return kept | {"images": [n for n in names if Path(str(n)).suffix.lower() not in VIDEOS],
                       "videos": [n for n in names if Path(str(n)).suffix.lower() in VIDEOS]}  # fmt: skip
    return kept | {f"{kind}s": names for kind in kinds}


def _files(folder: Path) -> Iterator[Path]:
    """Every file below, in the order of its path. Links to folders are not followed (they can form a circle)."""
    for where, folders, names in os.walk(folder, followlinks=False):
        folders.sort()
        yield from (Path(where, name) for name in sorted(names))


def _media_row(file: Path, folder: Path) -> dict[str, Any]:
    inner = file.relative_to(folder)
    row: dict[str, Any] = {"video" if file.suffix.lower() in VIDEOS else "image": inner.as_posix()}
    return row | {"label": inner.parent.name} if len(inner.parts) > 1 else row


_READERS: dict[str, Callable[[Path], Rows]] = {
    "jsonl": JsonLines, "json": _json_array, "parquet": ParquetRows, "hf": _saved, "folder": _folder,
}  # fmt: skip
