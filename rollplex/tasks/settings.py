"""What the built-in tasks' settings must be: of the right kind and in range, or a ValueError that names the setting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollplex.kinds import check_number


def check_range(setting: str, value: Any, form: str, least: int) -> tuple[int, int]:
    """Two whole numbers, ascending, `least` or more, as a tuple; else ValueError. form: what they are, for people."""
    whole = isinstance(value, list | tuple) and len(value) == 2 and all(type(v) is int for v in value)
    if not whole or not least <= value[0] <= value[1]:
        raise ValueError(f"{setting}={value!r} must be {form}, whole numbers of {least} or more")
    return value[0], value[1]


def check_format_reward(value: Any) -> None:
    """ValueError unless it can be the worth of the form."""
    check_number("format_reward", value)
    if not 0 <= value < 1:
        raise ValueError(f"format_reward={value} must be in [0, 1): less than a right answer is worth")


def check_image_size(value: Any) -> None:
    """ValueError unless it can be the side of a picture. Tasks call it before they compute with it."""
    if type(value) is not int or not 16 <= value <= 4096:
        raise ValueError(f"image_size={value!r} must be a whole number between 16 and 4096 pixels")


def check_question(question: Any, names: Sequence[str]) -> None:
    """ValueError unless it is text that names nothing but `names` in braces."""
    if not isinstance(question, str):
        raise ValueError(f"question={question!r} must be text")
    try:
        question.format(**dict.fromkeys(names, ""))
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        known = ", ".join(f"{{{name}}}" for name in names)
        raise ValueError(f"question={question!r} may name {known} in braces, and nothing else") from error
