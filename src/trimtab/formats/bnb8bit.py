"""bitsandbytes int8 (LLM.int8(), Dettmers et al. 2022): a byte a weight, one float32 a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.formats.base import Component, Guards, Share

if TYPE_CHECKING:
    import torch


class Int8:
    """An `Int8Params` weight; its `Linear8bitLt` computes from its state, not from its weight."""

    name = "int8"

    def layout(
        self, shape: tuple[int, ...], dtype: str, quantized_from: str | None = None
    ) -> tuple[Component, ...]:
        return (Component("CB", shape, "int8"), Component("SCB", (shape[0],), "float32"))

    def constant_bytes(self, shape: tuple[int, ...]) -> int:
        return 0

    def split(
        self, module: Any, parameter: Any, share: Share
    ) -> tuple[dict[str, torch.Tensor], Any]:
        rows = module.state.SCB if parameter.SCB is None else parameter.SCB
        return {"CB": parameter.data, "SCB": rows}, None

    def join(self, parts: dict[str, torch.Tensor], recipe: Any) -> Any:
        return parts["CB"], parts["SCB"]

    def stored(self, parts: dict[str, torch.Tensor], recipe: Any) -> dict[str, torch.Tensor]:
        import torch

        rows = torch.tensor(
            0, dtype=torch.uint8, device="cpu"
        )  # bitsandbytes' number for rows, one by one
        return {"weight": parts["CB"], "SCB": parts["SCB"], "weight_format": rows}

    def bind(self, module: Any, parameter: Any, joined: Any) -> None:
        module.state.CB, module.state.SCB = joined
        parameter.data = joined[0]
        # Else the layer's first forward takes these, and loses the state's.
        parameter.CB = parameter.SCB = None

    def release(self, module: Any, parameter: Any, bare: torch.Tensor, guards: Guards) -> None:
        parameter.data = bare
        parameter.CB = parameter.SCB = None
        module.state.CB, module.state.SCB = guards["CB"], guards["SCB"]
