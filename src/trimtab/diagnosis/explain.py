"""What an error or a text says, by the codes in it."""

from __future__ import annotations

from collections.abc import Iterator

from trimtab.diagnosis import registry
from trimtab.diagnosis.finding import Finding
from trimtab.diagnosis.rule import unwrapped
from trimtab.errors import TrimtabError


def explain(problem: BaseException | str) -> list[Finding]:
    """What is known of an exception or of a text with trimtab's codes in it.

    Args:
        problem: an exception, whose causes are looked at too, or a text: a message, a log.

    Returns:
        The finding of a `TrimtabError`; else one for each code, in the order in which the text
        names them. An empty list: no match.

    Example:
        >>> explain("the disk of /tmp is full [TT403]")[0].title
        'the disk is full'
    """
    if isinstance(problem, str):
        return list(_in_text(problem))
    for one in _chain(problem):
        if isinstance(one, TrimtabError):
            return [Finding.from_error(one)]
    return list(_in_text(str(problem)))


def page(code: str) -> str:
    """The page of a code as Markdown.

    Raises:
        LookupError: there is no such code.

    Example:
        >>> page("TT403").splitlines()[0]
        '## TT403: the disk is full'
    """
    return registry.rule(code).markdown()


def _chain(problem: BaseException) -> Iterator[BaseException]:
    """The exception, what caused it, and so on; each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [problem]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [one.__context__, one.__cause__]


def _in_text(text: str) -> Iterator[Finding]:
    known = registry.codes()
    for code in dict.fromkeys(registry.CODE.findall(text)):
        if code in known:
            told = registry.rule(code)
            # In brackets is how an error says its own code; elsewhere it may only be mentioned.
            sure = f"[{code}]" in text or text.strip() == code
            yield Finding(
                code,
                unwrapped(told.seen),
                unwrapped(told.why),
                unwrapped(told.fix),
                confidence="certain" if sure else "likely",
            )
