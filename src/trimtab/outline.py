"""The shape of a model before anything is loaded: ordered units, ties, caches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.plan import Unit, WeightSpec

if TYPE_CHECKING:
    from trimtab.checkpoint import Checkpoint


@dataclass(frozen=True)
class CacheLayer:
    """What one decoder layer keeps for each token: keys and values of `kv_heads` x `head_dim`.

    `window` limits the tokens of a sliding layer; a `shared` layer keeps none of its own.
    """

    kv_heads: int
    head_dim: int
    window: int | None
    shared: bool


@dataclass(frozen=True)
class Outline:
    """A model as ordered units.

    `units` are in running order; each parameter is in exactly one of them, a tied one in its
    owner's. `ties` are pairs (alias, owner) of parameter names. `modules`, `buffers` are all names
    of modules and buffers, `quant` the format of the linears, `dtype` the one computed in.
    """

    architecture: str
    units: tuple[Unit, ...]
    ties: tuple[tuple[str, str], ...]
    cache: tuple[CacheLayer, ...]
    vocab: int
    hidden: int
    dtype: str
    quant: str
    modules: frozenset[str]
    buffers: frozenset[str]

    @property
    def weights(self) -> Iterator[WeightSpec]:
        """All parameters that own their bytes."""
        return itertools.chain.from_iterable(unit.weights for unit in self.units)


def build_outline(checkpoint: Checkpoint, quant: str = "auto", dtype: str = "auto") -> Outline:
    """The model as units, from its config alone: nothing is loaded, everything is on `meta`.

    Args:
        checkpoint: what `open_checkpoint` gave; a folder with a config and no weights will do.
        quant: format of the linears: `nf4`, `nf4-dq`, `fp4`, `fp4-dq`, `int8`, `none`, or `auto`
            (the checkpoint's own, else `none`).
        dtype: torch's name of the dtype to compute in, or `auto` (the config's, else that of the
            checkpoint's tensors, else bfloat16).

    Raises:
        EnvironmentFault: TT101 bitsandbytes is missing, TT104 the model brings its own code.
        FormatFault: TT509 a format that is not supported, TT510 a config that is not understood.

    Example:
        >>> outline = build_outline(open_checkpoint("./my-model"), quant="nf4")
        >>> [unit.name for unit in outline.units if unit.kind == "layer"][0]
        'model.layers.0'
    """
    from trimtab.skeleton import build_skeleton, describe

    return describe(build_skeleton(checkpoint, quant, dtype))
