"""One call of the user's reward: its outcome, and the two ways to bound its time inside one process."""

from __future__ import annotations

import math
import signal
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, Literal

Reason = Literal["none", "nan", "raised", "timeout", "bad_type", "incomplete"]

LARGEST = 1e30
"""A larger reward counts as not finite: its square must not overflow in the group's standard deviation."""

SINGLE = "reward"
"""Name of the component when a task returns a plain number."""


@dataclass(frozen=True)
class Outcome:
    """What one reward call gave. Plain data: it crosses processes."""

    values: Mapping[str, float] = field(default_factory=dict)
    """Finite numbers by component name; a component that could not be scored is NaN. Empty if the call failed."""

    reason: Reason | None = None
    """Why the response, or one of its components, has no reward; None if all is well."""

    message: str = ""


class RewardTimeout(BaseException):
    """Interrupts a late reward. Not an Exception, so that `except Exception` in the reward does not swallow it."""


class TimeLimit(AbstractContextManager["TimeLimit"]):
    """A time limit for many calls on the main thread, by SIGALRM: enter once, `arm` and `disarm` around each call.

    The signal comes again every `REPEAT` seconds, for a reward whose bare `except:` swallows the first. It
    interrupts Python code, sleeps, locks and the `re` module; not a long call inside a C extension that never looks
    for signals, nor a reward that sets the alarm itself (then use workers). The handler and the timer that were set
    before come back on exit (with what is left of their time).
    """

    REPEAT = 0.25

    def __init__(self, seconds: float | None, allowed: float | None = None) -> None:
        """seconds: after which the signal comes; None sends none.

        allowed: what a reward that waits together with others is given, where another process keeps the limit; None is
            `seconds`.
        """
        self.seconds = seconds
        self.allowed = seconds if allowed is None else allowed
        self.fired = False
        self._armed = False
        if seconds is None:
            return
        if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
            where = "this thread is not the main thread" if hasattr(signal, "setitimer") else "this system has no timer"
            raise RuntimeError(
                f"reward timeout={seconds} with workers=0 interrupts the reward by a timer signal, but {where}; "
                "set workers to 1 or more, or timeout to None"
            )

    def __enter__(self) -> TimeLimit:
        if self.seconds is not None:
            self._entered = time.monotonic()
            self._old_handler = signal.signal(signal.SIGALRM, self._on_alarm)
            self._old_timer = signal.setitimer(signal.ITIMER_REAL, 0.0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.seconds is None:
            return
        self.disarm()
        # A handler that was not set from Python reads as None and cannot be put back.
        signal.signal(signal.SIGALRM, signal.SIG_DFL if self._old_handler is None else self._old_handler)
        delay, interval = self._old_timer
        if delay > 0:
            left = delay - (time.monotonic() - self._entered)
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3), interval)

    def arm(self, extra: float = 0.0) -> None:
        self.fired = False
        if self.seconds is not None:
            signal.signal(signal.SIGALRM, self._on_alarm)  # the last reward may have set its own
            self._armed = True
            signal.setitimer(signal.ITIMER_REAL, self.seconds + extra, self.REPEAT)

    def disarm(self) -> None:
        if self.seconds is not None:
            self._armed = False
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _on_alarm(self, signum: int, frame: FrameType | None) -> None:
        if self._armed:
            self.fired = True
            raise RewardTimeout


def guarded(call: Callable[[], Any], limit: TimeLimit, extra: float = 0.0) -> tuple[Any, Outcome | None]:
    """(what the user's code returned, None), or (None, its failure). Never raises for what that code does, except
    KeyboardInterrupt.

    (Lightning's answer to SIGTERM is a SystemExit of its own class, which must reach the Trainer.)
    extra: seconds beyond the limit.
    """
    value: Any = None
    try:
        try:
            limit.arm(extra)
            value = call()
            limit.disarm()
        except RewardTimeout:
            limit.disarm()
        except (Exception, SystemExit, CancelledError) as error:
            limit.disarm()
            if type(error).__name__ == "SIGTERMException":
                raise
            if not limit.fired:
                reason: Reason = "timeout" if isinstance(error, TimeoutError) else "raised"
                return None, Outcome(reason=reason, message=describe(error))
    except RewardTimeout:  # the alarm came again between an except and its disarm
        limit.disarm()
    if limit.fired:
        return None, Outcome(reason="timeout", message=f"no reward within {limit.allowed} s")
    return value, None


def read_value(value: Any) -> Outcome:
    """Turn what a reward returned into finite floats by name, NaN and a reason where that fails."""
    named = value if isinstance(value, Mapping) else {SINGLE: value}
    if not named:
        return Outcome(reason="bad_type", message="an empty dict; return None for a response that cannot be scored")
    values: dict[str, float] = {}
    problem: tuple[Reason, str] | None = None
    for name, item in named.items():
        if not isinstance(name, str) or not name:
            return Outcome(reason="bad_type", message=f"component names must be non-empty str, got {name!r}")
        number, reason, message = _read_number(item)
        values[name] = number
        if reason is not None and problem is None:
            problem = (reason, f"component {name!r}: {message}" if isinstance(value, Mapping) else message)
    if problem is None:
        return Outcome(values)
    # Without a dict there is no component to tell apart: the whole response is missing.
    return Outcome(values if isinstance(value, Mapping) else {}, *problem)


def read_score(name: str, value: Any) -> Outcome:
    """What a reward with a name returned: one number, or None where it does not apply."""
    number, reason, message = _read_number(value)
    if reason is None:
        return Outcome({name: number})
    return Outcome({} if reason == "none" else {name: math.nan}, reason, f"{name}: {message}")


def describe(error: BaseException) -> str:
    """One line: type, text and the place it was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace is not None else ""
    try:
        text = str(error)
    except Exception:
        text = "<its text cannot be read>"
    return f"{type(error).__name__}: {text}"[:500] + place


def _read_number(item: Any) -> tuple[float, Reason | None, str]:
    if item is None:
        return math.nan, "none", "returned None"
    if isinstance(item, str | bytes):
        return math.nan, "bad_type", f"returned {type(item).__name__}, expected a number"
    try:
        number = float(item)  # bool, int, NumPy scalars and tensors of one element too
    except Exception:
        hint = "; what returns one must be an async def" if hasattr(item, "__await__") else ""
        return math.nan, "bad_type", f"returned {type(item).__name__}, expected a number{hint}"
    if not math.isfinite(number) or abs(number) > LARGEST:
        return math.nan, "nan", f"returned {number}"
    return number, None, ""
