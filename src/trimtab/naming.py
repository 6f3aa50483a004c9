"""Names of modules: from the adapter's to this model's, and which ones a config targets."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final

_TOWER: Final = re.compile(r"vision|visual|image|audio|speech|tower|projector", re.IGNORECASE)
_LANGUAGE: Final = re.compile(r"language|text|llm", re.IGNORECASE)

Prefixes = tuple[str, str]
"""What a name begins with in the adapter's file, and in this model."""


def parents(names: Iterable[str]) -> set[str]:
    """Every module on the way to these parameters, the root left out."""
    found: set[str] = set()
    for name in names:
        path = name.rpartition(".")[0]
        while path and path not in found:
            found.add(path)
            path = path.rpartition(".")[0]
    return found


def rename(paths: Iterable[str], modules: set[str]) -> tuple[dict[str, str], list[Prefixes]]:
    """Maps module paths of a file to modules of the model, by one change of prefix per group.

    A path that is a module already stays. The others are compared by their ends: two names whose
    ends are equal, layer numbers included, vote for a change of prefix; the change with most votes
    is taken. Between changes with equal votes a language model is preferred to a tower, else none
    is taken. What is not in the mapping matches nothing.

    Example:
        >>> rename(["model.layers.0.q"], {"model.language_model.layers.0.q"})[1]
        [('model', 'model.language_model')]
    """
    paths = sorted(set(paths))
    mapping = {path: path for path in paths if path in modules}
    taken = set(mapping)
    used: list[Prefixes] = []
    for old, new in _changes([path for path in paths if path not in mapping], modules):
        for path in paths:
            if path in mapping or not _begins(path, old):
                continue
            target = _join(new, path[len(old) :].lstrip("."))
            if target in modules and target not in taken:
                mapping[path] = target
                taken.add(target)
                if (old, new) not in used:
                    used.append((old, new))
    return mapping, used


def _changes(paths: list[str], modules: set[str]) -> list[Prefixes]:
    """Changes of prefix that map some of `paths`, the most useful first."""
    ends: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        for start, end in _splits(module):
            ends[end].append(start)
    votes: Counter[Prefixes] = Counter()
    for path in paths:
        for old, end in _splits(path):
            votes.update((old, new) for new in ends.get(end, ()))
    by_old: dict[str, list[Prefixes]] = defaultdict(list)
    for change in votes:
        by_old[change[0]].append(change)
    best: list[Prefixes] = []
    for changes in by_old.values():
        ranks = sorted((-votes[one], _dislike(one), one) for one in changes)
        if len(ranks) == 1 or ranks[0][:2] != ranks[1][:2]:
            best.append(ranks[0][2])
    return sorted(best, key=lambda one: (-votes[one], len(one[0]), one))


def _splits(name: str) -> Iterable[Prefixes]:
    """Ways to split a name into a prefix without numbers and a rest."""
    parts = name.split(".")
    for at in range(len(parts)):
        if at and parts[at - 1].isdigit():
            return
        yield ".".join(parts[:at]), ".".join(parts[at:])


def _dislike(change: Prefixes) -> int:
    """0 for a change that keeps to towers or to the language model, 2 for one that crosses over."""
    old, new = change
    if bool(_TOWER.search(old)) != bool(_TOWER.search(new)):
        return 2
    return 0 if _LANGUAGE.search(new) or _TOWER.search(old) else 1


def _begins(path: str, prefix: str) -> bool:
    return not prefix or path.startswith(prefix + ".")


def _join(prefix: str, rest: str) -> str:
    return f"{prefix}.{rest}" if prefix else rest


def ends_with(name: str, patterns: str | Iterable[str]) -> bool:
    """PEFT's rule: a regular expression for the whole name, or a list of names or their ends."""
    if isinstance(patterns, str):
        return re.fullmatch(patterns, name) is not None
    return any(name == one or name.endswith(f".{one}") for one in patterns)


def is_targeted(config: Mapping[str, Any], name: str) -> bool:
    """Whether an adapter's config targets the module of that name, as PEFT decides it."""
    if (excluded := config.get("exclude_modules")) and ends_with(name, excluded):
        return False
    targets = config.get("target_modules")
    if not targets or not ends_with(name, targets):
        return False
    layers = config.get("layers_to_transform")
    if isinstance(targets, str) or name in targets or layers is None or layers == []:
        return True
    number = layer_number(name, config.get("layers_pattern"))
    return number is not None and number in ([layers] if isinstance(layers, int) else layers)


def layer_number(name: str, patterns: str | list[str] | None) -> int | None:
    """The number of the layer a module lies in."""
    if not patterns:
        found = re.match(r".*?\.[^.]*\.(\d+)\.", name)
        return int(found[1]) if found else None
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if found := re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", name):
            return int(found[1])
    return None


def pattern_value(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """The value of the first pattern that matches a module's name, as PEFT looks it up."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def exact_patterns(patterns: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """Patterns for the new names that say what `patterns` said for the old ones."""
    absent = object()
    values = {new: pattern_value(patterns, old, absent) for old, new in renamed.items()}
    return {f"^{re.escape(new)}": one for new, one in values.items() if one is not absent}


def stem(name: str) -> str:
    """What a name has before its first number: `model.layers` for `model.layers.0.mlp`."""
    parts = name.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0]] if numbers else parts[:-1])
