"""Finding the answer in a response."""

from __future__ import annotations

from typing import Any

import regex

SECONDS = 1.0
"""Time that one search with a user's pattern has: on unlucky text a pattern can search for ever."""

_TAG = regex.compile(r"<answer>(.*?)</answer>", regex.DOTALL)


def check_pattern(pattern: str, where: str) -> Any:
    """The compiled pattern; `.` matches line ends too. Raises ValueError, naming the setting, for one that is wrong."""
    try:
        return regex.compile(pattern, regex.DOTALL)
    except regex.error as error:
        raise ValueError(f"{where}={pattern!r} is not a regular expression: {error}") from error


def extract_answer(text: str, extract: str | None) -> str | None:
    """The part of a response that counts, without white space around it; None where it is not there.

    extract: None takes the whole text; "boxed" the content of the last \\boxed{...}; "tag" that of the last
        <answer>...</answer>; anything else is a regular expression, of which the last match counts (its first group, if
        it has groups).
    Raises TimeoutError when a search takes longer than `SECONDS`.
    """
    if extract is None:
        return text.strip()
    if extract == "boxed":
        return last_boxed(text)
    found = None
    pattern = _TAG if extract == "tag" else regex.compile(extract, regex.DOTALL)
    for match in pattern.finditer(text, timeout=SECONDS):
        found = match[1] if pattern.groups else match[0]
    return None if found is None else found.strip()


def last_boxed(text: str) -> str | None:
    """Content of the last \\boxed{...} whose braces close; None if there is none."""
    opened: list[int | None] = []
    last: tuple[int, int] | None = None
    for place, letter in enumerate(text):
        if letter == "{":
            opened.append(place + 1 if text.endswith("\\boxed", 0, place) else None)
        elif letter == "}" and opened:
            start = opened.pop()
            if start is not None and (last is None or start > last[0]):
                last = (start, place)
    return None if last is None else text[last[0] : last[1]].strip()
