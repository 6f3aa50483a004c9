"""What the fields of an adapter's config may hold: names, patterns, numbers, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

_NAMES: Final = (
    "target_modules", "exclude_modules", "modules_to_save", "target_parameters", "layers_pattern",
    "feedforward_modules",
)  # fmt: skip
_PATTERNS: Final = (*_NAMES[:2], "layers_pattern", "feedforward_modules")
"""Those that are regular expressions where they are one string."""
_BY_PATTERN: Final = ("rank_pattern", "alpha_pattern", "lambda_pattern", "n_frequency_pattern")
_NUMBERS: Final = ("r", "lora_alpha", "alpha")
_LONGEST: Final = 4096


def problem(config: Mapping[str, Any]) -> str | None:
    """What is wrong with the values of a config's fields, in words; None: nothing.

    Example:
        >>> problem({"target_modules": 3})
        'target_modules is 3, not names'
    """
    return next(_problems(config), None)


def _problems(config: Mapping[str, Any]) -> Iterator[str]:
    for field in _NAMES:
        value = config.get(field)
        if not (value is None or isinstance(value, str) or _all(value, str)):
            yield f"{field} is {value!r}, not names"
    for field in _BY_PATTERN:
        value = config.get(field) or {}
        if not isinstance(value, Mapping) or not all(map(_is_number, value.values())):
            yield f"{field} is {value!r}, not numbers by pattern"
    for field in _NUMBERS:
        if not (config.get(field) is None or _is_number(config[field])):
            yield f"{field} is {config[field]!r}, not a number"
    if not isinstance(config.get("r") or 0, int):
        yield f"r is {config['r']!r}, not a whole number"
    yield from _lora(config)
    layers = config.get("layers_to_transform")
    if not (layers is None or isinstance(layers, int) or _all(layers, int)):
        yield f"layers_to_transform is {layers!r}, not numbers of layers"
    rows = config.get("trainable_token_indices")
    lists = list(rows.values()) if isinstance(rows, Mapping) else [rows or []]
    if not all(_all(one, int) for one in lists):
        yield f"trainable_token_indices is {rows!r}, not numbers of tokens"
    base = config.get("base_model_name_or_path")
    if not (base is None or isinstance(base, str)):
        yield f"base_model_name_or_path is {base!r}, not a name"
    for field, pattern in _expressions(config):
        yield from _wrong(field, pattern)


def _lora(config: Mapping[str, Any]) -> Iterator[str]:
    """What LoRA cannot do without, and what is left out otherwise."""
    if config.get("peft_type") != "LORA":
        return
    if "r" in config and not (_is_number(config["r"]) and config["r"] > 0):
        yield f"r is {config['r']!r}, not a rank"
    for field in ("lora_alpha", *_BY_PATTERN[:2]):
        if field in config and config[field] is None:
            yield f"{field} is null"


def _expressions(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for field in _PATTERNS:
        value = config.get(field)
        if isinstance(value, str):
            yield field, value
    layers = config.get("layers_pattern") or ()
    yield from (("layers_pattern", one) for one in layers if not isinstance(layers, str))
    for field in _BY_PATTERN:
        yield from ((field, str(pattern)) for pattern in config.get(field) or {})
    # PEFT matches these names, too, as parts of a pattern.
    yield from (("modules_to_save", str(one)) for one in config.get("modules_to_save") or ())


def _wrong(field: str, pattern: str) -> Iterator[str]:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        yield f"{field} has {pattern!r}, which is no pattern: {error}"
    if len(pattern) > _LONGEST or repeats_a_repeat(pattern):
        yield f"{field} has {pattern[:80]!r}, which could take forever to match"


def repeats_a_repeat(pattern: str) -> bool:
    """Whether a pattern repeats a group without end that has such a repeat in it: `(a+)+`.

    Matching one can take time exponential in the length of a name.
    """
    plain = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "x", pattern)
    groups = [False]
    for at, sign in enumerate(plain):
        endless = re.match(r"[*+]|\{\d*,\}", plain[at + 1 :]) is not None
        if sign == "(":
            groups.append(False)
        elif sign == ")" and len(groups) > 1:
            inside = groups.pop()
            if inside and endless:
                return True
            groups[-1] |= inside or endless
        elif endless:
            groups[-1] = True
    return False


def _all(value: Any, kind: type) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(one, kind) and not isinstance(one, bool) for one in value
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
