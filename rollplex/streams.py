"""CUDA streams of the two lanes: the rollout lane has its own, of higher priority; the train lane the Trainer's.

Decoding is a chain of short kernels that wait for memory, prefix work long ones that fill the device: with priorities
the short ones are not queued behind the long ones. What crosses from one lane to the other goes through `hand_over` and
`take`: the taking stream waits for an event, and the allocator is told (`record_stream`) that it reads the tensors.

On a CPU device all of this does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class LaneStreams:
    """Args:
    train_sms: Multiprocessors that units beside the decode may use (a green context); None is all. The quota needs
        PyTorch's `torch.cuda.green_contexts`. Autograd runs a backward on the stream of its forward, so prefixes
        computed in the window are also differentiated under the quota.
    cuda: For tests; what `torch.cuda` is otherwise.
    """

    def __init__(self, train_sms: int | None = None, *, cuda: Any = torch.cuda) -> None:
        if train_sms is not None and train_sms < 1:
            raise ValueError(f"train_sms={train_sms} must be at least 1, or null for all multiprocessors")
        self.train_sms = train_sms
        self._cuda = cuda
        self._active = False
        self._quota: Any = None
        self._rollout: Any = None

    def start(self, device: torch.device) -> None:
        """Create the streams, on the train lane. ValueError when the device cannot give what was asked for."""
        self._active = device.type == "cuda"
        if not self._active:
            if self.train_sms is not None:
                raise ValueError(f"train_sms={self.train_sms} needs a CUDA device, but device is {device}; set it null")
            return
        self._device = device
        least, greatest = self._cuda.Stream.priority_range()
        self._rollout = self._cuda.Stream(device=device, priority=min(least, greatest))
        if self.train_sms is not None:
            self._quota = self._green_stream(device)

    def _green_stream(self, device: torch.device) -> Any:
        sms = self._cuda.get_device_properties(device).multi_processor_count
        assert self.train_sms is not None
        if self.train_sms >= sms:
            raise ValueError(f"train_sms={self.train_sms} leaves nothing to limit: {device} has {sms} multiprocessors")
        try:
            from torch.cuda.green_contexts import GreenContext

            context: Any = GreenContext.create(num_sms=self.train_sms, device_id=device.index or 0)
            return context.Stream()
        except (ImportError, AttributeError, RuntimeError) as error:
            raise ValueError(
                f"train_sms={self.train_sms}: this PyTorch ({torch.__version__}) or driver has no green contexts "
                f"({error}); set train_sms to null"
            ) from error

    @contextmanager
    def rollout_lane(self) -> Iterator[None]:
        """Around everything that the rollout lane's thread does."""
        if not self._active:
            yield
            return
        with self._cuda.device(self._device), self._cuda.stream(self._rollout):
            yield

    @contextmanager
    def unit(self, *, hidden: bool) -> Iterator[None]:
        """Around a train-lane unit, which is over on the device too when this returns: its time is its own, and what
        it made is there for whoever comes next."""
        if not self._active:
            yield
            return
        own = self._cuda.current_stream(self._device)
        stream = self._quota if hidden and self._quota is not None else own
        if stream is not own:
            stream.wait_stream(own)
        with self._cuda.stream(stream):
            yield
        stream.synchronize()
        if stream is not own:
            own.wait_stream(stream)

    def hand_over(self) -> Any:
        """An event after everything that the calling thread has launched; None on a CPU."""
        return self._cuda.current_stream(self._device).record_event() if self._active else None

    def take(self, event: Any, tensors: Iterable[Tensor] = ()) -> None:
        """The calling thread's stream waits for `event`, and `tensors` stay allocated until it has read them."""
        if event is None:
            return
        stream = self._cuda.current_stream(self._device)
        stream.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(stream)
