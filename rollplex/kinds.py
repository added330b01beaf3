"""What kind of value one setting must have; anything else is a ValueError that names it."""

from __future__ import annotations

import math
from typing import Any


def check_whole(setting: str, value: Any, least: int = 1, *, null: str | None = None) -> None:
    """ValueError unless `value` is a whole number, `least` or more. null: what None means, where it may be None."""
    if value is None and null is not None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        more = f", or null for {null}" if null is not None else ""
        raise ValueError(f"{setting}={value!r} must be a whole number, {least} or more{more}")


def check_number(setting: str, value: Any) -> None:
    """ValueError unless `value` is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{setting}={value!r} must be a finite number")


def check_flag(setting: str, value: Any) -> None:
    """ValueError unless `value` is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{setting}={value!r} must be true or false")
