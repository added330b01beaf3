"""Pictures and videos as the rows of a file name them: found, or refused, before anything opens them.

A row may hold a path, bytes, base64 text, a PIL picture, or what `datasets` stores: {"bytes": ..., "path": ...}.
"""

from __future__ import annotations

import base64
import binascii
import re
import stat
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
from PIL import Image

MAX_ENCODED_BYTES = 256 << 20
"""Largest encoded picture or video that is taken from a row or fetched. (Files on disk are read in parts.)"""

MAX_LISTED = 4096
"""Most frames of a video, or pictures of a row, that are looked at: far more than any model takes."""

FETCH_SECONDS = 30.0
"""Time that one address has, from the first word to the last byte."""

SHOWN = 200
"""Letters of a value that an error quotes."""

_BASE64 = re.compile(r"[A-Za-z0-9+/\r\n]{64,}={0,2}\s*")
_DATA = re.compile(r"data:[\w.+-]*/?[\w.+-]*(?:;[\w.+=-]+)*?;base64,", re.ASCII)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True)
class MediaAccess:
    """What rows may reach. Plain data: it crosses processes."""

    roots: tuple[Path, ...]
    """Folders, resolved. A file must lie in one of them once links and `..` are followed; relative paths are looked for
    in each, in order."""

    url_hosts: frozenset[str] = frozenset()
    """Hosts from which https and http addresses are fetched. Empty: nothing is fetched."""

    @classmethod
    def of(cls, roots: Sequence[str | Path], url_hosts: Sequence[str] = ()) -> MediaAccess:
        """Raises ValueError for a root that is no folder, or a host that is more than a name."""
        for root in roots:
            if not Path(root).is_dir():
                raise ValueError(f"media_roots names {str(root)!r}, which is not a folder")
        for host in url_hosts:
            if not re.fullmatch(r"[A-Za-z0-9.-]+|[0-9a-fA-F:]+", host):
                raise ValueError(f"allowed_url_hosts names {host!r}; give the host alone, e.g. images.example.org")
        return cls(tuple(Path(root).resolve() for root in roots), frozenset(host.lower() for host in url_hosts))

    def image(self, value: Any) -> Any:
        """A picture of a row -> what `open_image` takes: a path inside the roots, bytes or a PIL picture.

        Text is a `data:` address, another address, base64 (64 or more letters of its alphabet and nothing else, so no
        dot as a file's name has), or a path.
        Raises ValueError for anything else, and for what may not be reached; FileNotFoundError for what is not there.
        """
        if isinstance(value, Image.Image):
            return value
        if isinstance(value, bytes | bytearray | memoryview):
            return self._bytes(bytes(value))
        if isinstance(value, Mapping):
            return self._of_mapping(value)
        if isinstance(value, str | Path):
            return self._of_text(str(value))
        raise ValueError(f"must be a path, bytes, base64 text or a picture, not {type(value).__name__}")

    def video(self, value: Any) -> dict[str, Any]:
        """A video of a row -> the "video" and "fps" of a message's part.

        As for pictures; besides, a list of frames (each a picture), an array (T, H, W, 3) uint8, and {"video": any of
        these, "fps": number}. Raises as `image` does.
        """
        if isinstance(value, Mapping) and value.get("video") is not None:
            return self.video(value["video"]) | {"fps": value.get("fps")}
        if isinstance(value, np.ndarray):
            return {"video": value}
        if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview):
            if len(value) > MAX_LISTED:
                raise ValueError(f"has {len(value)} frames; at most {MAX_LISTED} are looked at")
            return {"video": [self.image(frame) for frame in value]}
        return {"video": self.image(value)}

    def _of_mapping(self, value: Mapping[str, Any]) -> Any:
        for name in ("bytes", "path", "base64", "url", "image"):
            if value.get(name) is not None:
                if name == "base64":
                    return self._decoded(value[name])
                return self.image(value[name])
        raise ValueError(f"has none of bytes, path, base64, url, but {', '.join(map(str, value))[:SHOWN] or 'nothing'}")

    def _of_text(self, text: str) -> Any:
        if data := _DATA.match(text[:SHOWN]):
            return self._decoded(text[data.end() :])
        if text.startswith("data:"):
            raise ValueError(f"{text[:80]!r} is a data address that is not base64")
        if text.startswith("file://"):
            return self._find(unquote(urlsplit(text).path))
        if _SCHEME.match(text):
            return fetch(text, self.url_hosts)
        if _BASE64.fullmatch(text):
            return self._decoded(text)
        return self._find(text)

    def _decoded(self, text: Any) -> bytes:
        if not isinstance(text, str | bytes):
            raise ValueError(f"base64 must be text, not {type(text).__name__}")
        if len(text) * 3 // 4 > MAX_ENCODED_BYTES:
            raise ValueError(f"its base64 has {len(text)} letters; at most {MAX_ENCODED_BYTES >> 20} MiB are read")
        try:
            return base64.b64decode("".join(text.split()) if isinstance(text, str) else text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"is not base64: {error}") from error

    def _bytes(self, data: bytes) -> bytes:
        if len(data) > MAX_ENCODED_BYTES:
            raise ValueError(f"has {len(data)} bytes; at most {MAX_ENCODED_BYTES >> 20} MiB are read")
        return data

    def _find(self, text: str) -> Path:
        """The regular file that a path names, links and `..` followed, inside the roots."""
        if not text or "\0" in text:
            raise ValueError(f"{text[:SHOWN]!r} is no path")
        for root in self.roots:
            try:
                found = (root / text).resolve(strict=True)
            except (FileNotFoundError, NotADirectoryError):
                continue
            if not any(found.is_relative_to(allowed) for allowed in self.roots):
                raise ValueError(
                    f"{text[:SHOWN]!r} leads outside of {self._roots}; add its folder to media_roots if that is meant"
                )
            if not stat.S_ISREG(found.stat().st_mode):
                raise ValueError(f"{text[:SHOWN]!r} is not a regular file")
            return found
        raise FileNotFoundError(f"no file {text[:SHOWN]!r} in {self._roots}")

    @property
    def _roots(self) -> str:
        return ", ".join(map(str, self.roots))


class _StayWithin(urllib.request.HTTPRedirectHandler):
    """Redirects only to hosts that are allowed too."""

    def __init__(self, hosts: frozenset[str]) -> None:
        self.hosts = hosts

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        _check_host(newurl, self.hosts)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def fetch(url: str, hosts: frozenset[str], *, seconds: float = FETCH_SECONDS, most: int = MAX_ENCODED_BYTES) -> bytes:
    """The bytes at an address, if its host is one of `hosts`; redirects must stay within them.

    Raises ValueError for another host or scheme, more than `most` bytes or `seconds`; OSError for what the network
    says.
    """
    _check_host(url, hosts)
    deadline = time.monotonic() + seconds
    parts, size = [], 0
    opener = urllib.request.build_opener(_StayWithin(hosts))
    with opener.open(url, timeout=seconds) as answer:
        while part := answer.read1(1 << 20):
            parts.append(part)
            size += len(part)
            if size > most:
                raise ValueError(f"{url[:SHOWN]!r} has more than {most} bytes")
            if time.monotonic() > deadline:
                raise ValueError(f"{url[:SHOWN]!r} took longer than {seconds:g} s")
    return b"".join(parts)


def _check_host(url: str, hosts: frozenset[str]) -> None:
    parts = urlsplit(url)
    if parts.scheme.lower() not in ("http", "https") or (parts.hostname or "").lower() not in hosts:
        raise ValueError(
            f"{url[:SHOWN]!r} is a URL, and nothing is fetched from {parts.scheme}://{parts.hostname}: give a local "
            "path, or add the host to allowed_url_hosts"
        )
