"""LoRAs by two products: which layers take them, that they are PEFT's, and that they let go."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tiny
from placing import placed
from trimtab.decode import lora_shortcuts
from trimtab.fakes import TorchProducts
from trimtab.foreign import adapter_layers
from trimtab.lora import BOUND, Lora, Shortcuts, is_right, plain_lora
from trimtab.placement import Placement


@pytest.fixture(params=["none", "nf4"])
def placement(request: pytest.FixtureRequest) -> Iterator[Placement]:
    folder = tiny.checkpoint("llama")
    adapters = {"a": tiny.adapter(folder), "b": tiny.adapter(folder, seed=7)}
    with placed(folder, request.param, (), adapters) as found:
        found.model.eval()
        yield found


def layers(placement: Placement) -> list[Any]:
    found = adapter_layers(placement.model.get_base_model())
    return [layer for _, _, layer in found if hasattr(layer, "lora_A")]


def given(layer: Any, tokens: int = 1) -> torch.Tensor:
    random = torch.Generator().manual_seed(tokens)
    return torch.randn(1, tokens, layer.in_features, generator=random).to(torch.bfloat16)


@torch.no_grad()
def test_a_layer_computes_the_same_by_products_and_has_its_forward_back(
    placement: Placement,
) -> None:
    shortcuts = Shortcuts(TorchProducts())
    found = layers(placement)
    before = [layer(given(layer)) for layer in found]
    with contextlib.suppress(KeyError), shortcuts.taken(found, torch.bfloat16) as count:
        assert count == len(found) > 0
        assert all("forward" in vars(layer) for layer in found)
        for layer, value in zip(found, before, strict=True):
            assert torch.equal(layer(given(layer)), value)
        raise KeyError
    assert not any("forward" in vars(layer) for layer in found)
    with shortcuts.taken(found, torch.bfloat16), shortcuts.taken(found, torch.bfloat16) as again:
        assert again == 0


class Beside(TorchProducts):
    """Products of which the first may still be read while the base computes."""

    def __init__(self) -> None:
        self.read: list[weakref.ref[torch.Tensor]] = []

    def down(self, x: torch.Tensor, lora: Any) -> torch.Tensor:
        assert x.is_contiguous()
        self.read.append(weakref.ref(x))
        return super().down(x, lora)

    def add(self, base: torch.Tensor, down: torch.Tensor, lora: Any) -> torch.Tensor:
        assert self.read[-1]() is not None
        return super().add(base, down, lora)


@torch.no_grad()
def test_what_is_read_beside_the_base_is_held_until_both_are_done(placement: Placement) -> None:
    products = Beside()
    layer = layers(placement)[0]
    x = given(layer, 2).reshape(1, -1, 2).transpose(1, 2)
    assert not x.is_contiguous()
    before = layer(x)
    with Shortcuts(products).taken([layer], torch.bfloat16):
        products.read.clear()
        # In another order of memory sums run in another order.
        assert torch.allclose(layer(x), before, rtol=BOUND, atol=BOUND)
    assert len(products.read) == 1


def test_an_interrupt_while_layers_take_it_leaves_none_that_has(
    placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, calls = layers(placement), itertools.count()
    own = torch.nn.Module.__setattr__

    def press(module: torch.nn.Module, name: str, value: Any) -> None:
        own(module, name, value)
        if name == "forward" and next(calls) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Module, "__setattr__", press)
        with (
            pytest.raises(KeyboardInterrupt),
            Shortcuts(TorchProducts()).taken(found, torch.bfloat16),
        ):
            pass
    assert not any("forward" in vars(layer) for layer in found)


@torch.no_grad()
def test_many_tokens_and_other_arguments_go_peft_s_way(placement: Placement) -> None:
    class Unused(TorchProducts):
        used = 0

        def down(self, x: torch.Tensor, lora: Any) -> torch.Tensor:
            self.used += 1
            return super().down(x, lora)

    products = Unused()
    (layer, *_) = layers(placement)
    with Shortcuts(products).taken([layer], torch.bfloat16) as count:
        assert count == 1
        products.used = 0
        many = layer(given(layer, tokens=9))
        assert products.used == 0
        layer(given(layer, tokens=8))
        assert products.used == 1
    assert torch.equal(many, layer(given(layer, tokens=9)))


def disabled(placement: Placement, layer: Any) -> None:
    layer.enable_adapters(False)


def training(placement: Placement, layer: Any) -> None:
    layer.train()


def two(placement: Placement, layer: Any) -> None:
    layer.set_adapter(["a", "b"])


def none(placement: Placement, layer: Any) -> None:
    layer._active_adapter = []


def rows(placement: Placement, layer: Any) -> None:
    layer.register_forward_pre_hook(lambda *_: None)


def sixteen_bits(placement: Placement, layer: Any) -> None:
    layer.lora_A["a"].to(torch.bfloat16)


def biased(placement: Placement, layer: Any) -> None:
    layer.lora_B["a"].bias = torch.nn.Parameter(torch.zeros(layer.out_features))


def strided(placement: Placement, layer: Any) -> None:
    weight = layer.lora_A["a"].weight
    weight.data = weight.data.T.contiguous().T


def merged(placement: Placement, layer: Any) -> None:
    layer.merged_adapters.append("a")


@pytest.mark.parametrize(
    "change", [disabled, training, two, none, rows, sixteen_bits, biased, strided, merged]
)
def test_what_is_more_than_two_products_is_left_to_peft(placement: Placement, change: Any) -> None:
    (layer, *_) = layers(placement)
    assert plain_lora(layer) is not None
    change(placement, layer)
    assert plain_lora(layer) is None


def test_other_kinds_are_left_to_peft() -> None:
    folder = tiny.checkpoint("llama")
    for kind in ("dora", "LoHa"):
        with placed(folder, "none", (), {"a": tiny.adapter(folder, kind)}) as found:
            found.model.eval()
            wrapped = adapter_layers(found.model.get_base_model())
            with Shortcuts(TorchProducts()).taken(
                [layer for _, _, layer in wrapped], torch.bfloat16
            ) as count:
                assert count == 0


def test_wrong_and_failing_products_are_not_taken_and_it_is_said(placement: Placement) -> None:
    class Wrong(TorchProducts):
        def down(self, x: torch.Tensor, lora: Any) -> torch.Tensor:
            return super().down(x, lora) * 1.1

    class Failing(TorchProducts):
        def down(self, x: torch.Tensor, lora: Any) -> torch.Tensor:
            raise OSError("no compiler\nand more")

    for products, why in ((Wrong(), "they differ from PEFT's"), (Failing(), "no compiler")):
        shortcuts = Shortcuts(products)
        with shortcuts.taken(layers(placement), torch.bfloat16) as count:
            assert count == 0
        assert shortcuts.fault == why


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.parametrize(("rank", "width", "out"), [(1, 64, 48), (3, 5000, 77), (16, 4096, 14336)])
@torch.no_grad()
def test_the_kernels_are_within_the_bound(
    dtype: torch.dtype, rounded: bool, rank: int, width: int, out: int
) -> None:
    device = torch.device("cuda", 0)
    shortcuts = lora_shortcuts(device)
    assert shortcuts is not None
    random = torch.Generator(device).manual_seed(1)
    down = torch.randn(rank, width, generator=random, device=device) * width**-0.5
    up = torch.randn(out, rank, generator=random, device=device)
    lora = Lora(down, up, 0.7, rounded)
    products = shortcuts._products
    assert is_right(products, lora, dtype)
    x = torch.randn(5, 1, width, generator=random, device=device).to(dtype)
    base = torch.zeros(5, 1, out, device=device, dtype=dtype)
    exact = x.double() @ down.double().T @ up.double().T * 0.7
    found = products.add(base, products.down(x, lora), lora).double()
    assert float((found - exact).abs().max()) <= BOUND * float(exact.abs().max())
