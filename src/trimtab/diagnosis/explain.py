"""What an error or a text says: by trimtab's codes in it, and by the tracebacks in it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable

from trimtab.diagnosis import registry
from trimtab.diagnosis.finding import Confidence, Finding
from trimtab.diagnosis.rule import Rule, unwrapped
from trimtab.diagnosis.sign import LEVELS, lowered
from trimtab.diagnosis.traceback import Raised, Traceback, read_traceback
from trimtab.diagnosis.versions import installed, is_within
from trimtab.errors import TrimtabError, chain


def explain(
    problem: BaseException | str, look_up: Callable[[str], str | None] = installed
) -> list[Finding]:
    """What is known of an exception, or of a text with a traceback or with trimtab's codes in it.

    Args:
        problem: an exception, whose causes are looked at too, or a text: a message, a traceback
            however it was pasted, a log, an issue.
        look_up: gives the version of a package that the text does not tell, or None; by default
            that of the package that is installed, which is not imported.

    Returns:
        The finding of a `TrimtabError`; else one for each code that is named or recognised, the
        surest first. An empty list: no match.

    Example:
        >>> explain("the disk of /tmp is full [TT403]")[0].title
        'the disk is full'
        >>> explain("TypeError: unhashable type: 'set'")
        []
    """
    if isinstance(problem, str):
        return _in_text(problem, look_up)
    for one in chain(problem):
        if isinstance(one, TrimtabError):
            return [Finding.from_error(one)]
    return _in_text("".join(traceback.format_exception(problem)), look_up)


def page(code: str) -> str:
    """The page of a code as Markdown.

    Raises:
        LookupError: there is no such code.

    Example:
        >>> page("TT403").splitlines()[0]
        '## TT403: the disk is full'
    """
    return registry.rule(code).markdown()


def _in_text(text: str, look_up: Callable[[str], str | None]) -> list[Finding]:
    found = _named(text)
    for code, finding in _recognised(text, look_up).items():
        found.setdefault(code, finding)
    # Sorting is stable: of equally sure ones the code that is named comes first.
    return sorted(found.values(), key=lambda one: LEVELS.index(one.confidence))


def _named(text: str) -> dict[str, Finding]:
    known = registry.codes()
    found = {}
    for code in dict.fromkeys(registry.CODE.findall(text)):
        if code in known:
            # In brackets is how an error says its own code; elsewhere it may only be mentioned.
            sure = f"[{code}]" in text or text.strip() == code
            found[code] = _finding(registry.rule(code), "certain" if sure else "likely")
    return found


def _recognised(text: str, look_up: Callable[[str], str | None]) -> dict[str, Finding]:
    """By code, those that the last exceptions show first."""
    told = read_traceback(text)
    known = [registry.rule(code) for code in registry.codes()]
    rules = [rule for rule in known if rule.signs]
    found: dict[str, Finding] = {}
    for raised in reversed(told.raised or (Raised("", text),)):
        for rule in rules:
            if rule.code not in found and (sure := _weigh(rule, raised)):
                outside = _outside(rule, told, look_up)
                sure = lowered(sure, 1) if outside else sure
                found[rule.code] = _finding(rule, sure, outside)
    for rule in known:
        if rule.code not in found and any(re.search(one, text) for one in rule.said):
            found[rule.code] = _finding(rule, "likely")
    return found


def _weigh(rule: Rule, raised: Raised) -> Confidence | None:
    weights = [weight for sign in rule.signs if (weight := sign.weigh(raised))]
    return min(weights, key=LEVELS.index) if weights else None


def _outside(rule: Rule, told: Traceback, look_up: Callable[[str], str | None]) -> str:
    """A sentence on a version that is not known to have the fault; empty if there is none."""
    for package, (first, end) in rule.affected.items():
        version = told.versions.get(package) or look_up(package)
        if version and not is_within(version, first, end):
            where = "in this text" if package in told.versions else "installed here"
            return f"{package} {version} is {where}; the fault is not known in that version."
    return ""


def _finding(rule: Rule, sure: Confidence, outside: str = "") -> Finding:
    why = "\n\n".join(part for part in (unwrapped(rule.why), outside) if part)
    return Finding(rule.code, unwrapped(rule.seen), why, unwrapped(rule.fix), confidence=sure)
