"""The matrix: each case in each column, and what came of it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple

from trimtab.diagnosis.doctor import mask
from trimtab.repro.cases import Case, Subject, words
from trimtab.repro.failure import Failure, owner, read_failure
from trimtab.repro.process import Ran, run
from trimtab.repro.script import script

CLOSE: Final = 0.05
"""Largest difference of logits, relative to the largest of them, that is still rounding."""

LONGEST: Final = 80
"""Characters of an exception in a cell."""

_QUANTIZED = ("Params4bit", "Int8Params")


@dataclass(frozen=True)
class Stack:
    """An interpreter (with options), the versions in it, the variables that its scripts get."""

    name: str
    python: tuple[str, ...]
    versions: Mapping[str, str]
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


@dataclass(frozen=True)
class Cell:
    """What came of a case in a column.

    `outcome`: `works` (nothing to compare with), `equal`, `differs`, `failed` (an exception),
    `stopped` (over the time limit), `died` (without a traceback). `verdict` says it in words;
    `fine`: as it should be. `codes` are the pages on it. `parameters`: how many are of which class
    and where, afterwards; `rests`: for trimtab, bytes by tier.
    """

    case: Case
    stack: str
    quant: str
    outcome: str
    verdict: str
    fine: bool
    script: str
    seconds: float
    codes: tuple[str, ...] = ()
    library: str = ""
    why: str = ""
    failure: Failure | None = None
    tokens: tuple[int, ...] = ()
    parameters: Mapping[str, int] = field(default_factory=dict)
    rests: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return {
            **asdict(self),
            "case": self.case.value,
            "title": self.case.title,
            "failure": asdict(self.failure) if self.failure else None,
        }


def matrix(
    subject: Subject,
    stacks: Sequence[Stack],
    limit: float,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[Cell]:
    """Runs every case; column by column, since each is compared with the first of its column."""
    columns = [(stack, quant) for stack in stacks for quant in subject.quants]
    total = len(columns) * len(Case)
    number = 0
    for stack, quant in columns:
        ran: dict[Case, Ran] = {}
        for case in Case:
            number += 1
            progress(f"{number}/{total}: {case.title}; {words(quant)}; {stack.name}")
            text = script(subject, case, quant)
            ran[case] = run(
                stack.python,
                text,
                f"{case.value}.py",
                subject.arguments,
                limit,
                stack.environment,
            )
            yield judged(subject, stack, quant, case, text, ran, limit)


def judged(
    subject: Subject,
    stack: Stack,
    quant: str,
    case: Case,
    text: str,
    ran: Mapping[Case, Ran],
    limit: float,
) -> Cell:
    """The cell of a case that was run, as were those before it in its column."""
    one = ran[case]
    cell: dict[str, Any] = {
        "case": case, "stack": stack.name, "quant": quant, "script": text, "seconds": one.seconds,
    }  # fmt: skip
    answers = _answers(one)
    if one.status != 0 or not answers:
        return Cell(**cell, **_unfinished(one, subject, stack, limit), fine=False)
    expected = _expected(ran, case)
    outcome, said = _compared(answers[-1], expected) if expected else ("works", "works")
    remarks = list(_remarks(case, ran))
    codes = tuple(one.code for one in remarks)
    library, why = owner(codes[0]) if codes else ("", "")
    rests: dict[str, int] = next((told["rests"] for told in one.told if "rests" in told), {})
    return Cell(
        **cell,
        outcome=outcome,
        verdict=", ".join([said, *(f"{one.text} [{one.code}]" for one in remarks)]),
        fine=outcome != "differs" and not any(one.wrong for one in remarks),
        codes=codes,
        library=library,
        why=why,
        tokens=tuple(answers[-1]["tokens"]),
        parameters=answers[-1]["parameters"],
        rests=rests,
    )


def _answers(ran: Ran | None) -> list[dict[str, Any]]:
    return [told for told in ran.told if "tokens" in told] if ran else []


def _unfinished(ran: Ran, subject: Subject, stack: Stack, limit: float) -> dict[str, Any]:
    """The fields of a cell whose script did not end well."""
    if ran.status is None:
        return {"outcome": "stopped", "verdict": f"stopped after {limit:g} s"}
    hidden = {subject.model: "MODEL", subject.adapter: "ADAPTER"} if subject.arguments else {}
    failure = read_failure(ran.stderr, hidden, stack.versions.get)
    if failure is None:
        how = f"signal {-ran.status}" if ran.status < 0 else f"status {ran.status}"
        return {"outcome": "died", "verdict": f"ended with {how} and without a traceback"}
    said = f"{failure.exception}: {failure.message}" if failure.message else failure.exception
    said = said if len(said) <= LONGEST else f"{said[:LONGEST].rstrip()} [...]"
    code = f" [{failure.code}]" if failure.code else ""
    rewritten = ", the base was rewritten [TT507]" if _rewritten(ran) else ""
    return {
        "outcome": "failed",
        "verdict": f"{said}{code}{rewritten}",
        "codes": tuple(one for one in (failure.code, "TT507" if rewritten else "") if one),
        "library": failure.library,
        "why": failure.why,
        "failure": failure,
    }


def _expected(ran: Mapping[Case, Ran], case: Case) -> dict[str, Any] | None:
    """The answer of all on one device: of the base, then of the adapter."""
    whole = _answers(ran.get(Case.WHOLE))
    if case is Case.WHOLE or len(whole) < 2:
        return None
    return whole[0 if case is Case.SPLIT else 1]


def _compared(answer: Mapping[str, Any], expected: Mapping[str, Any]) -> tuple[str, str]:
    if any(math.isnan(one) for one in answer["logits"]):
        return "differs", "NaN"
    if answer["tokens"] != expected["tokens"]:
        return "differs", "other tokens"
    pairs = list(zip(answer["logits"], expected["logits"], strict=True))
    apart = max(abs(one - other) for one, other in pairs)
    if apart > CLOSE * max(abs(other) for _, other in pairs):
        return "differs", f"equal tokens, logits {apart:.2g} apart"
    return "equal", "equal tokens"


class _Remark(NamedTuple):
    """What happened without an error, the code of the page on it, whether it is a fault."""

    text: str
    code: str
    wrong: bool = True


def _remarks(case: Case, ran: Mapping[Case, Ran]) -> Iterator[_Remark]:
    if case in (Case.WHOLE, Case.TRIMTAB):
        return
    here, whole, split = (_answers(ran.get(one)) for one in (case, Case.WHOLE, Case.SPLIT))
    now = here[-1]["parameters"]
    if case is not Case.SPLIT and split and _away(split[0]["parameters"]) and not _away(now):
        yield _Remark(f"everything was silently moved to {_most(now)}", "TT221")
    wanted = _quantized(whole[0]["parameters"]) if whole else 0
    if wanted and not _quantized(now):
        yield _Remark("nothing was quantized", "TT515")
    elif _quantized(now) < wanted:
        some = f"only {_quantized(now)} of {wanted} weights were quantized"
        yield _Remark(some, "TT515", wrong=False)
    if _rewritten(ran[case]):
        yield _Remark("the base was rewritten", "TT507")


def _rewritten(ran: Ran) -> bool:
    return any(told.get("rewritten") for told in ran.told)


def _quantized(parameters: Mapping[str, int]) -> int:
    return sum(count for kind, count in parameters.items() if kind.startswith(_QUANTIZED))


def _away(parameters: Mapping[str, int]) -> int:
    return sum(count for kind, count in parameters.items() if kind.endswith(" meta"))


def _most(parameters: Mapping[str, int]) -> str:
    places: dict[str, int] = {}
    for kind, count in parameters.items():
        place = kind.rpartition(" ")[2]
        places[place] = places.get(place, 0) + count
    return mask(max(places, key=lambda place: places[place]))
