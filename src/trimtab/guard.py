"""Guarded stand-ins: tensors that answer for a parked weight without holding its bytes.

While a weight is parked its data is a stride-0 view of one element, of the true shape, dtype and
device, and its class is a subclass that sees each use through `__torch_function__`: questions of
shape pass, `detach` and `.data` give lazy aliases, reads compute on a private copy from the store,
and writes raise. Nothing ever computes on the one element.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from trimtab.errors import RunningFault
from trimtab.formats import Format
from trimtab.formats.base import Share


class Source:
    """Where the bytes of a guarded tensor come from: one weight of a slab, or one part of it.

    Args:
        name: the weight's full name.
        storage: its format.
        recipe: what the format needs beside the plain tensors.
        read: private copies of the weight's plain tensors on the device that runs; given the name
            of one, of that one.
        part: the component this tensor stands for.

    `guards` are, for a whole parameter, guarded tensors for each of its components.
    """

    def __init__(
        self,
        name: str,
        storage: Format,
        recipe: Any,
        read: Callable[..., dict[str, torch.Tensor]],
        part: str,
    ) -> None:
        self.name = name
        self.storage = storage
        self.recipe = recipe
        self.read = read
        self.part = part
        self.guards: Mapping[str, torch.Tensor] = {}

    def is_same(self, other: object) -> bool:
        """Whether it gives the bytes that this one gives."""
        return isinstance(other, Source) and (other.read, other.part) == (self.read, self.part)

    def tensor(self) -> torch.Tensor:
        """A private copy of the part."""
        with torch.inference_mode(False):
            return self.read(self.part)[self.part]

    def of_part(self, part: str) -> Source:
        return Source(self.name, self.storage, self.recipe, self.read, part)

    def parameter(self, guarded: torch.Tensor) -> torch.Tensor:
        """A private copy of the whole parameter, of the class it has when it is not parked."""
        plain = plain_class(type(guarded))
        with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
            joined = self.storage.join(self.read(), self.recipe)
            private: torch.Tensor = torch.Tensor._make_subclass(
                plain, data_of(joined), guarded.requires_grad
            )
        private.__dict__.update(
            {key: value for key, value in guarded.__dict__.items() if not key.startswith("_trim")}
        )
        module: Any = SimpleNamespace(state=SimpleNamespace())
        self.storage.bind(module, cast("torch.nn.Parameter", private), joined)
        # Without a module, an int8 weight keeps its scales itself, as when it is new.
        private.__dict__.update(vars(module.state))
        return private


class View:
    """A view of guarded tensors: what `func` returns, made anew for each read.

    `at` is its place among the tensors that are returned.
    """

    def __init__(self, name: str, func: Any, args: Any, kwargs: Any, at: int) -> None:
        self.name = name
        self._call = func, args, kwargs
        self._at = at

    def tensor(self) -> torch.Tensor:
        out, _ = _on_copies(*self._call)
        view: torch.Tensor = tree_leaves(out)[self._at]
        return view


def data_of(joined: Any) -> torch.Tensor:
    """The tensor among what a format joined that becomes the parameter's data."""
    data: torch.Tensor = joined[0] if isinstance(joined, tuple) else joined
    return data


def stand_in(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, share: Share | None = None
) -> torch.Tensor:
    """A tensor of that shape that holds one element, by `share` one for all; NaN where there is."""
    one = torch.empty((), dtype=dtype, device=device)
    one.fill_(float("nan") if dtype.is_floating_point else 1)
    return (one if share is None else share(one)).expand(shape)


def guarded_tensor(source: Source | View, like: torch.Tensor) -> torch.Tensor:
    """A guarded tensor, not a parameter, of the shape, dtype and device of `like`."""
    with torch._C.DisableTorchFunctionSubclass():
        # A stand-in's one element serves again.
        one = like.untyped_storage().nbytes() == like.element_size()
        bare = like if one else stand_in(like.shape, like.dtype, like.device)
        alias: torch.Tensor = torch.Tensor._make_subclass(guard_class(torch.Tensor), bare)
    alias._trim_source = source  # type: ignore[attr-defined]
    return alias


def is_guarded(tensor: object) -> bool:
    return hasattr(type(tensor), "_trim_plain")


def plain_class(guard: type) -> type:
    return getattr(guard, "_trim_plain", guard)


@functools.cache
def guard_class(plain: type) -> type:
    """The guarded subclass of a tensor class; the same name, because PEFT compares names."""
    body: dict[str, Any] = {
        "_trim_plain": plain,
        "__torch_function__": classmethod(_guarded_call),
        "__deepcopy__": _deepcopy,
        "__reduce_ex__": lambda self, protocol: materialize(self).__reduce_ex__(protocol),
        "__iter__": lambda self: iter(self.unbind(0)),
        "as_subclass": lambda self, kind: materialize(self).as_subclass(kind),
        "set_": _refuse_set,
        "__module__": plain.__module__,
        "__doc__": plain.__doc__,
        "to": _to,
        "cpu": lambda self, *args, **kwargs: _to(self, "cpu"),
        "cuda": lambda self, device=None, **kwargs: _to(self, device or "cuda"),
    }
    if plain.__name__ == "Params4bit":
        body["quant_state"] = property(_read_state, _refuse_state)
    return type(plain)(plain.__name__, (plain,), body)


def materialize(guarded: torch.Tensor) -> torch.Tensor:
    """A private copy with the true bytes: a parameter of a parameter, a tensor of an alias."""
    source: Source | View = guarded._trim_source  # type: ignore[attr-defined]
    # An alias that was given to `nn.Parameter` is an instance of it, too, but not of its class.
    if isinstance(source, Source) and issubclass(type(guarded), torch.nn.Parameter):
        return source.parameter(guarded)
    return source.tensor()


def refuse_write(guarded: torch.Tensor, how: str) -> RunningFault:
    name = guarded._trim_source.name  # type: ignore[attr-defined]
    return RunningFault(
        "TT601",
        f"{how} would write to {name}, which is parked",
        why="its bytes rest in a store; what is written to the stand-in would be lost",
        fix="keep this unit resident, or change the checkpoint",
        weight=name,
    )


_Tensor: Any = torch.Tensor
_ALIASES = {_Tensor.detach, _Tensor.data.__get__}
_PASS = {
    getattr(_Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "requires_grad", "grad", "grad_fn", "ndim",
                 "is_leaf", "is_cuda", "is_cpu", "is_meta", "is_quantized", "is_sparse", "itemsize",
                 "nbytes", "names", "_backward_hooks", "is_nested", "is_xpu", "is_mps", "is_mkldnn",
                 "is_sparse_csr", "_version", "_cdata")
    if hasattr(_Tensor, name)
} | {_Tensor.requires_grad.__set__, _Tensor.grad.__set__} | {
    getattr(_Tensor, name)
    for name in ("size", "dim", "numel", "nelement", "__len__", "element_size", "requires_grad_",
                 "is_floating_point", "is_complex", "get_device", "__hash__", "type", "ndimension",
                 "_has_compatible_shallow_copy_type", "is_inference", "is_signed")
    if hasattr(_Tensor, name)
}  # fmt: skip
_TWIN = {_Tensor.is_contiguous, _Tensor.stride, _Tensor.storage_offset}
_STORAGE = {
    getattr(_Tensor, name)
    for name in ("data_ptr", "const_data_ptr", "untyped_storage", "storage", "share_memory_",
                 "resize_")
    if hasattr(_Tensor, name)
}  # fmt: skip


def _guarded_call(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    first: Any = args[0] if args else next(iter(kwargs.values()), None)
    if func in _PASS:
        if func is _Tensor.type and (len(args) > 1 or kwargs):
            return _real_call(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if is_guarded(first):
        if func in _ALIASES:
            source = first._trim_source
            return guarded_tensor(source, first)
        if func in _TWIN and isinstance(first._trim_source, Source):
            twin = torch.empty(first.shape, dtype=first.dtype, device="meta")
            return func(twin, *args[1:], **kwargs)
        if func == _Tensor.data.__set__:
            source = first._trim_source
            if args[1] is first or (
                isinstance(source, Source)
                and source.is_same(getattr(args[1], "_trim_source", None))
            ):
                return None
            raise refuse_write(first, "setting .data")
        if func in _STORAGE or _writes(func):
            raise refuse_write(first, getattr(func, "__name__", str(func)))
    if is_guarded(kwargs.get("out")):
        raise refuse_write(kwargs["out"], f"{getattr(func, '__name__', func)} with out=")
    return _real_call(func, args, kwargs)


def _real_call(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls `func` on private copies; a write to one raises, and a view of one is guarded again."""
    out, copies = _on_copies(func, args, kwargs)
    leaves, spec = tree_flatten(out)
    owners = {private.untyped_storage().data_ptr(): guarded for guarded, private, _ in copies}
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_meta:
            owner = owners.get(leaf.untyped_storage().data_ptr())
            if owner is not None and leaf.numel():
                name = owner._trim_source.name  # type: ignore[attr-defined]
                leaves[at] = guarded_tensor(View(name, func, args, kwargs, at), leaf)
    return tree_unflatten(leaves, spec)


def _on_copies(
    func: Any, args: Any, kwargs: Any
) -> tuple[Any, list[tuple[torch.Tensor, torch.Tensor, int]]]:
    """What `func` returns for private copies, with each guarded tensor, its copy and version."""
    copies: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def real(value: Any) -> Any:
        if not is_guarded(value):
            return value
        private = materialize(value)
        copies.append((value, private, private._version))
        return private

    out = func(*tree_map(real, args), **tree_map(real, kwargs))
    for guarded, private, version in copies:
        if private._version != version:
            raise refuse_write(guarded, getattr(func, "__name__", str(func)))
    return out, copies


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _READ_DUNDERS)
    if name.endswith("_") and not name.startswith("_"):
        return True
    return name == "__set__"


_READ_DUNDERS = {"__index__", "__int__", "__invert__", "__init__", "__iter__"}


def _deepcopy(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    private = materialize(self)
    memo[id(self)] = private
    return private


def _refuse_set(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    # torch does not ask `__torch_function__` for this one.
    raise refuse_write(self, "set_")


def _to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    parse: Any = torch._C._nn._parse_to
    device, dtype, _, _ = parse(
        *[materialize(a) if is_guarded(a) else a for a in args],
        **{key: value for key, value in kwargs.items() if key != "copy"},
    )
    stays = (
        device is None
        or torch.device(device) == self.device
        or (torch.device(device).index is None and torch.device(device).type == self.device.type)
    )
    if stays and dtype in (None, self.dtype) and not kwargs.get("copy"):
        return self
    return materialize(self).to(*args, **kwargs)


def _read_state(self: torch.Tensor) -> Any:
    # Lazy, too: PEFT and `state_dict` ask for it often, and read little of it.
    source: Source = self._trim_source  # type: ignore[attr-defined]
    return source.storage.join(dict(source.guards), source.recipe)[1]


def _refuse_state(self: torch.Tensor, value: object) -> None:
    raise refuse_write(self, "setting quant_state")
