"""The event loop on which async rewards wait.

It is one loop for all groups, because what a reward keeps between them, such as the connections of a client, belongs
to the loop it was first used on: on another one it fails with "Event loop is closed".
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Own(threading.local):
    """Each thread has its own."""

    runner: asyncio.Runner | None = None


_own = _Own()


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """What it returns. Raises what it raises; interrupted by anything else, the loop ends with all that waits on it."""
    if _own.runner is None:
        _own.runner = asyncio.Runner()
    try:
        return _own.runner.run(coroutine)
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException:
        end()
        raise


@atexit.register
def end() -> None:
    """Of this thread's loop; the next `run` makes another."""
    runner, _own.runner = _own.runner, None
    if runner is not None:
        runner.close()
