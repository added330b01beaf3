"""From a row of a data file to chat messages, by the field names that data sets have."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollplex.data.media import MAX_LISTED, MediaAccess

PROMPT = ("messages", "prompt", "problem", "question", "conversations")
IMAGES = ("images", "image")
VIDEOS = ("videos", "video")
ANSWER = ("answer", "solution", "ground_truth", "label")
ROLES = ("system", "user", "assistant")
SPEAKERS = {"human": "user", "gpt": "assistant"}
"""Roles by their names in LLaVA's and ShareGPT's `conversations`, whose messages have `from` and `value`."""

Message = dict[str, Any]


@dataclass(frozen=True)
class Layout:
    """Where a row keeps what. None: the first of the usual names that the row has."""

    prompt_field: str | None = None
    image_field: str | None = None
    video_field: str | None = None
    answer_field: str | None = None
    question: str | None = None
    """The prompt of rows that have none."""

    system_prompt: str | None = None
    """Put before rows that have no system message of their own."""

    prompt_suffix: str = ""
    """Added to the last message."""

    image_placeholder: str = "<image>"
    video_placeholder: str = "<video>"

    def messages(self, row: Mapping[str, Any], access: MediaAccess) -> list[Message]:
        """Chat messages as `VLMTask.messages` gives them, media found but not opened.

        Where a row's pictures stand in its text: at the image parts without a picture of their own if its messages have
        such parts; else at the placeholders, if the text holds exactly as many as the row has pictures; else, without
        any placeholder, all before the first user text. Any other number is an error: nothing is guessed. The same for
        videos. Without pictures a placeholder is text.

        Raises ValueError or OSError, saying which field is wrong and how.
        """
        messages = [_parts(message) for message in self._messages(row)]
        if messages[-1]["role"] == "assistant":  # what is to be learnt, in data for imitation
            messages.pop()
        if not messages or messages[-1]["role"] != "user":
            last = f"the {messages[-1]['role']}'s" if messages else "no more"
            raise ValueError(f"the last message before the answer is {last}; a prompt ends with the user's")
        for kind, field, names, placeholder, read in (
            ("video", self.video_field, VIDEOS, self.video_placeholder, access.video),
            ("image", self.image_field, IMAGES, self.image_placeholder, lambda value: {"image": access.image(value)}),
        ):
            name, values = _listed(row, field, names)
            reader = _reader(read, name)
            media = [{"type": kind, **reader(value, i)} for i, value in enumerate(values)]
            _read_own(messages, kind, reader)
            _place(messages, kind, media, placeholder)
            if not any(part["type"] == kind for m in messages for part in m["content"]):
                _check_forgotten(row, kind, field)
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": [_text(self.system_prompt)]})
        if self.prompt_suffix:
            messages[-1]["content"].append(_text(self.prompt_suffix))
        return messages

    def answer(self, row: Mapping[str, Any]) -> Any:
        """The right answer of a row: of its field, else what the assistant says last in its messages; None if it has
        none."""
        name = self.answer_field or _first(row, ANSWER)
        if name is not None:
            return row.get(name)
        model = row.get("reward_model")
        if isinstance(model, Mapping):
            return model.get("ground_truth")
        last = self._messages(row)[-1]
        said = _content(last) if isinstance(last, Mapping) and _role(last) == "assistant" else None
        return said if isinstance(said, str) else None

    def _messages(self, row: Mapping[str, Any]) -> Sequence[Any]:
        name = self.prompt_field or _first(row, PROMPT)
        prompt = self.question if name is None else row.get(name)
        if prompt is None:
            missing = f"no field {self.prompt_field!r}" if self.prompt_field else f"none of {', '.join(PROMPT)}"
            raise ValueError(f"has {missing}; its fields are {_names(row)}: set prompt_field or question")
        if isinstance(prompt, str) and name == "messages":
            prompt = json.loads(prompt)  # Parquet files often hold them as text
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}]
        if not isinstance(prompt, list) or not prompt:
            raise ValueError(f"{name} must be text or a list of messages, not {type(prompt).__name__} (or it is empty)")
        return prompt


def _first(row: Mapping[str, Any], names: Sequence[str]) -> str | None:
    return next((name for name in names if row.get(name) is not None), None)


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(sorted(map(str, row)))[:200] or "none"


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _listed(row: Mapping[str, Any], field: str | None, usual: Sequence[str]) -> tuple[str, list[Any]]:
    """(field name, media of a row as a list); one that is no list is a list of one.

    A list in `video` is the frames of one video, as it is in any field of videos whose name has no s at its end.
    """
    if field is not None and field not in row:
        raise ValueError(f"has no field {field!r}; its fields are {_names(row)}")
    name = field or _first(row, usual)
    value = None if name is None else row[name]
    if name is None or value is None:
        return usual[0], []
    several = isinstance(value, list | tuple) and (usual is IMAGES or name.endswith("s"))
    values = value if several else [value]
    if len(values) > MAX_LISTED:
        raise ValueError(f"{name} has {len(values)} entries; at most {MAX_LISTED} are looked at")
    return name, list(values)


def _check_forgotten(row: Mapping[str, Any], kind: str, field: str | None) -> None:
    """ValueError for a row whose pictures (videos) are in a field that nobody looks into: it would train without."""
    names = "image|img|picture|photo" if kind == "image" else "video|clip"
    for name, value in row.items():
        known = re.fullmatch(rf"({names})s?(_?(path|file|url|name|byte)s?)?", str(name), re.IGNORECASE)
        if field is None and known and isinstance(value, str | bytes | Mapping | list) and value:
            raise ValueError(f"has its {kind} in {name}, which is not looked into: set {kind}_field to {name}")


def _reader(read: Callable[[Any], Mapping[str, Any]], name: str) -> Callable[[Any, int], Mapping[str, Any]]:
    """`read`, with the field and the number in its errors."""

    def named(value: Any, number: int) -> Mapping[str, Any]:
        try:
            return read(value)
        except ValueError as error:
            raise ValueError(f"{name}[{number}] {error}") from error
        except OSError as error:
            raise OSError(f"{name}[{number}] {error}") from error

    return named


def _role(message: Mapping[str, Any]) -> Any:
    speaker = message.get("from")
    return message.get("role") or (SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else None)


def _content(message: Mapping[str, Any]) -> Any:
    return message.get("content", message.get("value"))


def _parts(message: Any) -> Message:
    """A message of a row with its content as a list of parts. Fields that are null (Arrow fills them in) are left out.

    `image_url` parts, as of OpenAI's API, become image parts.
    """
    if not isinstance(message, Mapping):
        raise ValueError(f"a message must be an object with role and content, not {type(message).__name__}")
    role, content = _role(message), _content(message)
    if role not in ROLES:
        raise ValueError(f"a message has the role {str(role)[:80]!r}; it must be one of {', '.join(ROLES)}")
    if isinstance(content, str):
        return {"role": role, "content": [_text(content)]}
    if not isinstance(content, list):
        raise ValueError(f"a message's content must be text or a list of parts, not {type(content).__name__}")
    parts = []
    for given in content:
        if not isinstance(given, Mapping):
            raise ValueError(f"a part of a message must be an object with a type, not {type(given).__name__}")
        part = {name: value for name, value in given.items() if value is not None}
        kind = part.get("type")
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append(_text(part["text"]))
        elif kind in ("image", "video"):
            parts.append({name: part[name] for name in ("type", kind, "fps", "path", "bytes", "url") if name in part})
        elif kind == "image_url":
            url = part.get("image_url")
            parts.append({"type": "image", "image": url.get("url") if isinstance(url, Mapping) else url})
        else:
            raise ValueError(f"a part of type {str(kind)[:80]!r} is none of text (with its text), image, video")
    return {"role": role, "content": parts}


def _own(part: Mapping[str, Any]) -> Any:
    """What a media part itself holds; None for a bare one, which only says where."""
    kind = part["type"]
    if kind in part:
        return part[kind]
    rest = {name: part[name] for name in ("path", "bytes", "url") if name in part}
    return rest or None


def _place(messages: list[Message], kind: str, media: list[dict[str, Any]], placeholder: str) -> None:
    """Put a row's media of one kind into its messages, in order."""
    bare = [part for m in messages for part in m["content"] if part["type"] == kind and _own(part) is None]
    if bare:
        if len(bare) != len(media):
            raise ValueError(f"the messages have {len(bare)} {kind} parts to fill, the row has {len(media)} {kind}s")
        for part, filled in zip(bare, media, strict=True):
            part.update(filled)
        return
    if not media:
        return
    asked = [m for m in messages if m["role"] == "user"]
    texts = [part["text"] for m in asked for part in m["content"] if part["type"] == "text"]
    marks = sum(text.count(placeholder) for text in texts) if placeholder else 0
    if marks == 0:
        asked[0]["content"][:0] = media
    elif marks != len(media):
        raise ValueError(f"the text has {marks} {placeholder} for {len(media)} {kind}s; there must be as many, or none")
    else:
        rest = iter(media)
        for message in asked:
            message["content"] = [piece for part in message["content"] for piece in _split(part, placeholder, rest)]


def _split(part: dict[str, Any], placeholder: str, media: Any) -> list[dict[str, Any]]:
    if part["type"] != "text":
        return [part]
    pieces = re.split(re.escape(placeholder), part["text"])
    out = [_text(pieces[0])]
    for piece in pieces[1:]:
        out += [next(media), _text(piece)]
    return [one for one in out if one["type"] != "text" or one["text"]]


def _read_own(messages: list[Message], kind: str, reader: Callable[[Any, int], Mapping[str, Any]]) -> None:
    """Media that parts of the messages hold themselves."""
    for message in messages:
        for i, part in enumerate(message["content"]):
            own = _own(part) if part["type"] == kind else None
            if own is not None:
                fps = {"fps": part["fps"]} if "fps" in part else {}
                message["content"][i] = {"type": kind, **reader(own, i), **fps}
