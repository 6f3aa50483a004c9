"""A recorded call: what records it, and how its inputs and its output are told and kept apart."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeGuard

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from trimtab.park import is_leaf


class Recorder(Protocol):
    """Records what a call does on the device, to do it again without the host."""

    def capture(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """What `work` returned, and what replays it; nothing has been computed yet."""


CAPTURING = threading.Lock()
"""The process's: torch lets one capture be under way at a time, whoever makes it."""


class CudaRecorder:
    """CUDA graphs that share one pool of memory, as long as one of them lives."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._other: torch.cuda.Stream | None = None

    def capture(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        with CAPTURING, uncollected():
            return self._capture(work)

    def _capture(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        # torch refuses the pool of graphs that are all gone.
        pool = next((one.pool() for one in self._graphs), None)
        # And it stays on the capturing stream where a capture fails.
        with (
            torch.cuda.device(self._device),
            torch.cuda.stream(torch.cuda.current_stream(self._device)),
            # Other threads may pin memory, read files or load a model meanwhile.
            torch.cuda.graph(
                graph, pool=pool, stream=self._stream(), capture_error_mode="thread_local"
            ),
        ):
            out = work()
        self._graphs.add(graph)
        return out, graph.replay

    def _stream(self) -> torch.cuda.Stream | None:
        """torch's own stream for captures, None, where it is of this device.

        It is made on the device that captures first, for the whole process; and each stream that
        multiplies keeps a workspace of cuBLAS for good, so that others should be few.
        """
        own = torch.cuda.graph.default_capture_stream
        if own is None or own.device == self._device:
            return None
        self._other = self._other or torch.cuda.Stream(self._device)
        return self._other


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """While inside, no garbage is collected: what it frees may wait for the device, and a capture
    that has to wait has failed."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor)


def describe_inputs(inputs: Mapping[str, Any], leaves: list[torch.Tensor]) -> tuple[Any, ...]:
    """Shapes and dtypes of the tensors, which go to `leaves`, and the value of all else."""
    found, structure = tree_flatten(dict(inputs), is_leaf=is_leaf)
    described: list[Any] = []
    for one in found:
        if isinstance(one, torch.Tensor):
            leaves.append(one)
            described.append((tuple(one.shape), one.dtype))
        elif isinstance(one, int | float | str | bool | None):
            described.append(one)
        else:
            described.append(id(one))
    return (*described, str(structure))


def with_leaves(inputs: Mapping[str, Any], leaves: list[torch.Tensor]) -> Any:
    """`inputs` with other tensors in the place of its own, in the order of `describe_inputs`."""
    found, structure = tree_flatten(dict(inputs), is_leaf=is_leaf)
    rest = iter(leaves)
    return tree_unflatten(
        [next(rest) if isinstance(one, torch.Tensor) else one for one in found], structure
    )


def private_output(output: Any) -> Any:
    """A model's output with tensors of its own; the cache in it stays what it is."""
    fresh = copy.copy(output)
    for name, value in output.items():
        if isinstance(value, torch.Tensor):
            fresh[name] = value.clone()
    return fresh
