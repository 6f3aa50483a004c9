"""Whether an adapter fits a base model: decided from headers and shapes, before anything loads."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.adapters import ADAPTED, AdapterHeader
from trimtab.compat import check_base, check_counts, check_kind, known_config
from trimtab.errors import AdapterFault
from trimtab.filekeys import FileKey, key_here, repeated, split_key, tied_keys
from trimtab.naming import (
    ends_with,
    exact_patterns,
    is_targeted,
    parents,
    pattern_value,
    rename,
    stem,
)

Shapes = Mapping[str, tuple[int, ...]]
"""Names of the base's parameters, tied ones under each of their names, and unquantized shapes."""


@dataclass(frozen=True)
class Fit:
    """How an adapter goes onto a base.

    `keys` maps a key of the file to the one that PEFT expects; `config` is the config that PEFT
    gets; `modules` are the base's modules that the adapter changes; `base_tensors` maps a key of
    the file to the base's parameter that it repeats; `skipped` are modules that the targets name
    and the adapter leaves alone; `unused` are keys that the user allowed to match nothing;
    `notes` say in words what was mapped, skipped or dropped.
    """

    header: AdapterHeader
    keys: Mapping[str, str]
    config: Mapping[str, Any]
    modules: tuple[str, ...]
    base_tensors: Mapping[str, str]
    skipped: tuple[str, ...]
    unused: tuple[str, ...]
    notes: tuple[str, ...]


def fit(
    header: AdapterHeader,
    shapes: Shapes,
    base_name: str | None = None,
    *,
    ties: Iterable[tuple[str, str]] = (),
    known_fields: Iterable[str] | None = None,
    allow_unused: bool = False,
    allow_other_base: bool = False,
) -> Fit:
    """Decides how an adapter goes onto a base, or says why it does not.

    Args:
        header: the adapter.
        shapes: every parameter of the base by name, tied names too, with unquantized shapes.
        base_name: hub name or folder of the base; None if it is not known.
        ties: pairs of names in `shapes` that are one tensor, such as the head's and the table's.
        known_fields: the config fields that the installed PEFT knows for this kind; None: all.
        allow_unused: tensors that match nothing are left out, and named, instead of an error.
        allow_other_base: an adapter of another base is accepted, and said.

    Raises:
        AdapterFault: TT303 tensors that match nothing, TT304 targets that match no module, TT305
            another base, TT306 a wrong size, TT307 config fields that PEFT does not know, TT308 an
            initialisation that rewrites the base, TT312 tensors that are missing, TT313 a module
            that PEFT cannot adapt, TT314 a kind of adapter that is not supported.

    Example:
        >>> fit(read_adapter("./sql-lora"), shapes_of(model)).notes  # doctest: +SKIP
        ()
    """
    notes: list[str] = []
    check_kind(header)
    check_counts(header)
    check_base(header, base_name, allow_other_base, notes)
    config = known_config(header, known_fields, notes)
    modules = parents(shapes)
    keys = [split_key(header, key) for key in header.weights]
    tied = tied_keys(header)
    mapping, changes = rename({one.path for one in (*keys, *tied) if one.path}, modules)
    changed = {old: new for old, new in mapping.items() if old != new}
    for old, new in changes:
        notes.append(
            f"modules that the adapter calls {old or '(none)'}.* are {new or '(none)'}.* here"
        )
    used = _used(header, keys, mapping)
    repeats = repeated(header, (*keys, *tied), used, mapping, ties)
    placed = {one.key for one in (*used, *repeats)}
    base_tensors, homeless = _base_tensors(header, placed, shapes, modules, notes)
    strays = sorted({one.key for one in keys} - placed) + homeless
    if strays:
        _refuse_strays(header, keys, used, strays, mapping, allow_unused)
        notes.append(
            f"{len(strays)} tensors of {header.source} match nothing and are left out:"
            f" {three(strays)}"
        )
    _check_wrappers(header, used, mapping, shapes)
    own = {mapping[one.path] for one in used if one.path and header.is_own(one.key)}
    if used and not any(one.path for one in used) and not header.is_prompt:
        own = _aimed(header, config, modules)
    saved = {mapping[one.path] for one in used if one.path and not header.is_own(one.key)}
    # Trained rows beside a LoRA have a field of their own; their table is no target.
    rows = {mapping[one.path] for one in used if one.rest.startswith("token_adapter.")}
    skipped = _retarget(header, config, own - rows, changed, shapes, notes)
    _check_sizes(header, [*used, *repeats], mapping, shapes)
    return Fit(
        header,
        {one.key: key_here(one, mapping) for one in (*used, *repeats)},
        config,
        tuple(sorted(own | saved)),
        base_tensors,
        skipped,
        tuple(strays),
        tuple(notes),
    )


def three(names: Iterable[str]) -> str:
    """Up to three names, and how many more there are."""
    listed = sorted(names)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + more


def _used(header: AdapterHeader, keys: list[FileKey], mapping: Mapping[str, str]) -> list[FileKey]:
    """The keys whose module is in this model, and targeted under its old or its new name."""
    targets = header.config.get("target_modules")
    everything = targets in (None, "all-linear") or bool(header.target_parameters)
    everything |= header.peft_type == "ADAPTION_PROMPT"  # whose rule is another; PEFT holds to it

    def aimed(one: FileKey) -> bool:
        return (
            everything
            or not header.is_own(one.key)
            or one.rest.startswith("token_adapter.")
            or is_targeted(header.config, one.path)
            or is_targeted(header.config, mapping[one.path])
        )

    return [one for one in keys if not one.path or (one.path in mapping and aimed(one))]


def _refuse_strays(
    header: AdapterHeader,
    keys: list[FileKey],
    used: list[FileKey],
    strays: list[str],
    mapping: Mapping[str, str],
    allowed: bool,
) -> None:
    if allowed and used:
        return
    placed = [one.path for one in keys if one.path in mapping]
    if placed and not used:
        raise AdapterFault(
            "TT304",
            f"target_modules={_shown(header)} of {header.source} matches no module that its file"
            f" has tensors for: {three(set(placed))}",
            fix="restore the adapter_config.json that was saved with these weights",
        )
    homeless = [one.path for one in keys if one.path and one.path not in mapping]
    raise AdapterFault(
        "TT303",
        f"{len(strays)} of the {len(header.tensors)} tensors of {header.source} match nothing in"
        f" the model: {three(strays)}",
        why="the base has no such modules, or the config does not target them"
        + _nearest(homeless, mapping),
        fix="check that the adapter was made for this model; allow_unused=True leaves them out",
        unused=tuple(strays),
    )


def _shown(header: AdapterHeader) -> str:
    targets = header.target_modules
    return repr(targets) if isinstance(targets, str) else f"[{three(targets or ())}]"


def _nearest(homeless: list[str], mapping: Mapping[str, str]) -> str:
    close = difflib.get_close_matches(homeless[0], list(mapping.values()), 1) if homeless else []
    return f"; the nearest to {homeless[0]} is {close[0]}" if close else ""


def _check_wrappers(
    header: AdapterHeader, used: list[FileKey], mapping: Mapping[str, str], shapes: Shapes
) -> None:
    """A module that only wraps a linear has no weight of its own, and PEFT refuses it."""
    if header.target_parameters or header.peft_type == "ADAPTION_PROMPT":
        return
    own = {mapping[one.path] for one in used if one.path and header.is_own(one.key)}
    holders = {name.rpartition(".")[0] for name in shapes}
    wrong = sorted(own - holders)
    if wrong:
        raise AdapterFault(
            "TT313",
            f"{header.source} adapts {len(wrong)} modules that PEFT cannot adapt: {three(wrong)}",
            why="they wrap a layer and have no weight of their own",
            fix="an adapter for this model targets the layer inside, such as"
            f" {next((n for n in sorted(shapes) if n.startswith(wrong[0] + '.')), wrong[0])}",
        )


def _aimed(header: AdapterHeader, config: Mapping[str, Any], modules: set[str]) -> set[str]:
    """The modules that the config targets, without those that are trained whole."""
    saved = header.modules_to_save
    return {
        module
        for module in modules
        if is_targeted(config, module) and not any(f".{one}." in f".{module}." for one in saved)
    }


def _retarget(
    header: AdapterHeader,
    config: dict[str, Any],
    own: set[str],
    changed: Mapping[str, str],
    shapes: Shapes,
    notes: list[str],
) -> tuple[str, ...]:
    """Makes the config target exactly the modules that the file has tensors for."""
    if "target_modules" not in config or header.target_parameters or header.is_prompt:
        return ()
    if header.peft_type == "ADAPTION_PROMPT" and not changed:
        return ()
    aimed = _aimed(header, config, parents(shapes))
    left = aimed - own
    stems = {stem(module) for module in own}
    lacking = [m for m in left if stem(m) in stems and len(shapes.get(f"{m}.weight", ())) > 1]
    if lacking and config["target_modules"] != "all-linear":
        raise AdapterFault(
            "TT312",
            f"{header.source} targets {len(lacking)} modules that its file has no tensors for:"
            f" {three(lacking)}",
            why="PEFT would fill them with untrained weights",
            fix="the file is incomplete, or its config is not the one it was saved with",
        )
    if left:
        notes.append(f"{len(left)} modules that the targets match are left alone: {three(left)}")
    if changed:
        for field in ("rank_pattern", "alpha_pattern"):
            if config.get(field):
                pairs = {**{name: name for name in own - set(changed.values())}, **changed}
                config[field] = exact_patterns(config[field], pairs)
        if isinstance(config.get("feedforward_modules"), (str, list)):
            rules = config["feedforward_modules"]
            old_of = {new: old for old, new in changed.items()}
            config["feedforward_modules"] = sorted(
                m for m in own if ends_with(old_of.get(m, m), rules)
            )
    if aimed != own or changed:
        config["target_modules"] = sorted(own)
        for field in ("exclude_modules", "layers_to_transform", "layers_pattern"):
            if field in config:
                config[field] = None
    return tuple(sorted(left))


def _check_sizes(
    header: AdapterHeader, used: list[FileKey], mapping: Mapping[str, str], shapes: Shapes
) -> None:
    for one in used:
        if not one.path:
            continue
        module = mapping[one.path]
        found = header.tensors[one.key].shape
        if not header.is_own(one.key):
            _same_size(header, one.key, found, (shapes.get(f"{module}.{one.rest}", found),))
        elif header.peft_type == "LORA" and f"{module}.weight" in shapes:
            wanted = _lora_shapes(header, one, shapes[f"{module}.weight"])
            _same_size(header, one.key, found, wanted)


def _lora_shapes(
    header: AdapterHeader, one: FileKey, weight: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """Shapes that a LoRA tensor may have on a weight: two where the weight may be transposed."""
    if header.config.get("use_qalora") or len(weight) < 2:
        return ()
    rank = pattern_value(header.config.get("rank_pattern") or {}, one.path, header.config.get("r"))
    rank = rank if isinstance(rank, int) else 8
    rows, columns, *kernel = weight
    if len(weight) > 2:
        shape = {
            "lora_A.weight": (rank, columns, *kernel),
            "lora_B.weight": (rows, rank, *[1] * len(kernel)),
        }.get(one.rest)
        return (shape,) if shape else ()
    return {
        "lora_A.weight": ((rank, columns), (rank, rows)),
        "lora_B.weight": ((rows, rank), (columns, rank)),
        "lora_embedding_A": ((rank, rows),),
        "lora_embedding_B": ((columns, rank),),
        "lora_magnitude_vector": ((rows,), (columns,)),
        "lora_magnitude_vector.weight": ((rows,), (columns,)),
    }.get(one.rest, ())


def _same_size(
    header: AdapterHeader, key: str, found: tuple[int, ...], wanted: tuple[tuple[int, ...], ...]
) -> None:
    if not wanted or found in wanted:
        return
    table = re.search(r"embed|wte|lm_head", key) is not None
    raise AdapterFault(
        "TT306",
        f"{key} of {header.source} is {list(found)}, the model needs {list(wanted[0])}",
        why="the adapter was trained with another vocabulary" if table else "",
        fix=f"load the base in 16 bits, call resize_token_embeddings({max(found)}), save it with"
        " save_pretrained, and name that folder as the base"
        if table
        else "check that the adapter was made for this model and that its config is its own",
        found=found,
        wanted=wanted[0],
    )


def _base_tensors(
    header: AdapterHeader,
    placed: set[str],
    shapes: Shapes,
    modules: set[str],
    notes: list[str],
) -> tuple[dict[str, str], list[str]]:
    """The base's parameters that the file repeats, by key, and the keys that are none of them."""
    found: dict[str, str] = {}
    names = {
        key: key.removeprefix(ADAPTED).replace(".base_layer.", ".")
        for key in header.base_tensors
        if key not in placed
    }
    mapping, _ = rename({name.rpartition(".")[0] for name in names.values()}, modules)
    for key, name in names.items():
        path, _, last = name.rpartition(".")
        here = f"{mapping[path]}.{last}" if path in mapping else name
        if here in shapes:
            _same_size(header, key, header.tensors[key].shape, (shapes[here],))
            found[key] = here
    if found:
        notes.append(f"the file repeats {len(found)} tensors of the base: {three(found.values())}")
    return found, sorted(set(names) - set(found))
