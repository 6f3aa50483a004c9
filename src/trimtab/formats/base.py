"""What a storage format is: named plain tensors whose shapes follow from the weight's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

Share: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"
"""Gives one copy for all equal tensors on a device; it belongs to a placement."""

Guards: TypeAlias = "Mapping[str, torch.Tensor]"
"""Guarded stand-ins by component key."""

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Component:
    """One plain tensor of a stored weight: its key there, its shape, torch's name of its dtype.

    `rests` is a smaller dtype that holds the same values, in which it rests and moves.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    rests: str = ""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def resting_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.rests or self.dtype]


class Format(Protocol):
    """Splits a weight into plain tensors and joins them again.

    A format is stateless. `split` gives the moving parts, in the order and with the shapes of
    `layout`; what is the same for each weight of a kind (code books) stays in the recipe that
    `split` returns beside them, one copy by `share`. `join` makes, from views of a buffer and the
    recipe, what `bind` can put into the module in a few attribute writes; it is called once per
    slot, not per forward.
    """

    name: str

    def layout(
        self, shape: tuple[int, ...], dtype: str, quantized_from: str | None = None
    ) -> tuple[Component, ...]:
        """What `split` gives of a weight; `quantized_from` is the dtype it had, where known."""

    def constant_bytes(self, shape: tuple[int, ...]) -> int: ...

    def split(
        self, module: Any, parameter: Any, share: Share
    ) -> tuple[dict[str, torch.Tensor], Any]:
        """The moving tensors of a loaded weight, and the rest of what `join` needs.

        Raises:
            AttributeError: it was loaded in another kind of format.
            ValueError: it is of this kind and stored in another way, which is what it says.
        """

    def join(self, parts: dict[str, torch.Tensor], recipe: Any) -> Any: ...

    def stored(self, parts: dict[str, torch.Tensor], recipe: Any) -> dict[str, torch.Tensor]:
        """The tensors of a checkpoint file; their names there, without the module's.

        Tensors of `parts` may be on `meta`, but for those without a dimension.
        """

    def bind(self, module: Any, parameter: Any, joined: Any) -> None:
        """Makes the weight compute from `joined`."""

    def release(self, module: Any, parameter: Any, bare: torch.Tensor, guards: Guards) -> None:
        """Leaves nothing of `joined` in the module.

        `bare` becomes the parameter's data; `guards` stand for the other tensors of `layout`.
        """
