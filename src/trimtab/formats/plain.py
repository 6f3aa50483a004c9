"""16- and 32-bit weights: one tensor, as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.formats.base import Component, Guards, Share

if TYPE_CHECKING:
    import torch


class Plain:
    """A weight that is stored in the dtype it computes in."""

    name = "plain"

    def layout(
        self, shape: tuple[int, ...], dtype: str, quantized_from: str | None = None
    ) -> tuple[Component, ...]:
        return (Component("data", shape, dtype),)

    def constant_bytes(self, shape: tuple[int, ...]) -> int:
        return 0

    def split(
        self, module: Any, parameter: Any, share: Share
    ) -> tuple[dict[str, torch.Tensor], Any]:
        return {"data": parameter.data}, None

    def join(self, parts: dict[str, torch.Tensor], recipe: Any) -> Any:
        return parts["data"]

    def stored(self, parts: dict[str, torch.Tensor], recipe: Any) -> dict[str, torch.Tensor]:
        return {"weight": parts["data"]}

    def bind(self, module: Any, parameter: Any, joined: Any) -> None:
        parameter.data = joined

    def release(self, module: Any, parameter: Any, bare: torch.Tensor, guards: Guards) -> None:
        parameter.data = bare
