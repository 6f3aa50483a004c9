"""What a loader copies to the GPU, taken there through pinned memory.

The driver copies from pageable memory on one thread; a file that the loader has mapped is pageable.
torch's threads fill a pinned buffer side by side, and the link empties it while the next is filled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from trimtab.store import HostMemory

PART: Final = 16 * 2**20
"""Bytes of a buffer; there are two."""

LEAST: Final = 2**20
"""Bytes of a copy that is worth it."""


@contextlib.contextmanager
def uploading(device: torch.device) -> Iterator[None]:
    """While inside, this thread's large copies from host memory to a GPU go through pinned memory.

    They are ordered with the current stream, as others are, and return before they are done. Where
    nothing can be pinned, and on a CPU, nothing changes.
    """
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            memories = [HostMemory(PART, pin=True) for _ in range(2)]
            for one in memories:
                stack.callback(one.close)
            if all(one.pinned for one in memories):
                mark = torch.cuda.current_stream(device).record_event
                through = Through([one.buffer for one in memories], mark)
                stack.enter_context(_Uploads(device, through))
        yield


class Through:
    """Copies tensors to a device by way of `buffers` (flat uint8, of one size), in turns.

    `mark` gives an event of the computation's present position; a buffer is written to again when
    its copy is done.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], mark: Callable[[], Any]) -> None:
        self._buffers = buffers
        self._mark = mark
        self._copied: list[Any] = [None] * len(buffers)
        self._next = 0

    def copy(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A copy of a contiguous tensor in host memory."""
        made = torch.empty_like(tensor, device=device)
        source, target = (one.view(-1).view(torch.uint8) for one in (tensor, made))
        size = self._buffers[0].numel()
        for start in range(0, source.numel(), size):
            part = source[start : start + size]
            buffer = self._buffers[self._next][: part.numel()]
            if self._copied[self._next] is not None:
                self._copied[self._next].synchronize()
            buffer.copy_(part)
            target[start : start + size].copy_(buffer, non_blocking=True)
            self._copied[self._next] = self._mark()
            self._next = (self._next + 1) % len(self._buffers)
        return made


class _Uploads(TorchFunctionMode):
    """Takes the calls of `Tensor.to` that are such copies and no more."""

    def __init__(self, device: torch.device, through: Through) -> None:
        super().__init__()
        self._device = device
        self._through = through

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.to and self._takes(*args, **kwargs):
            return self._through.copy(args[0], self._device)
        return func(*args, **kwargs)

    def _takes(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        where = args[0] if args else kwargs.get("device")
        return (
            type(tensor) is torch.Tensor
            and len(args) < 2
            and kwargs.keys() <= {"device", "dtype"}
            and isinstance(where, (int, str, torch.device))
            and _same(torch.device(where), self._device)
            and kwargs.get("dtype") in (None, tensor.dtype)
            and tensor.device.type == "cpu"
            and tensor.is_contiguous()
            and not tensor.requires_grad
            and tensor.nbytes >= LEAST
        )


def _same(asked: torch.device, device: torch.device) -> bool:
    """Whether they are one; `cuda` alone is the current one."""
    if asked.type == "cuda" and asked.index is None:
        asked = torch.device("cuda", torch.cuda.current_device())
    return asked == device
