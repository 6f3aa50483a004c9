"""The task: sums of two numbers from 0 to 99, in English or in French words."""

import random
from dataclasses import dataclass

LIMIT = 100
# fmt: off
ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen",
]
TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
UNITES = [
    "zéro", "un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf", "dix", "onze",
    "douze", "treize", "quatorze", "quinze", "seize", "dix-sept", "dix-huit", "dix-neuf",
]
DIZAINES = [
    "", "", "vingt", "trente", "quarante", "cinquante", "soixante", "soixante", "quatre-vingt",
    "quatre-vingt",
]
# fmt: on


@dataclass(frozen=True)
class Sum:
    """One question with its answer in both languages."""

    question: str
    english: str
    french: str


def english(number: int) -> str:
    """`159` -> `"one hundred fifty nine"`."""
    if number >= 100:
        rest = f" {english(number % 100)}" if number % 100 else ""
        return f"{ONES[number // 100]} hundred{rest}"
    if number < 20:
        return ONES[number]
    return TENS[number // 10] + (f" {ONES[number % 10]}" if number % 10 else "")


def french(number: int) -> str:
    """`159` -> `"cent cinquante-neuf"`; the traditional spelling, with hyphens below 100."""
    if number >= 100:
        hundreds = "cent" if number < 200 else f"{UNITES[number // 100]} cent"
        return hundreds + (f" {french(number % 100)}" if number % 100 else "")
    if number < 20:
        return UNITES[number]
    if number == 80:
        return "quatre-vingts"
    # Seventy and ninety count on from sixty and eighty: soixante-dix, quatre-vingt-dix.
    base = DIZAINES[number // 10]
    rest = number % 20 if number >= 60 else number % 10
    if rest == 0:
        return base
    joint = " et " if rest in (1, 11) and number < 80 else "-"
    return f"{base}{joint}{UNITES[rest]}"


def split(seed: int, held_out_share: float = 0.1) -> tuple[list[Sum], list[Sum]]:
    """All sums as (training, held out). A pair is held out in both orders, or not at all."""
    pairs = [(a, b) for a in range(LIMIT) for b in range(a, LIMIT)]
    random.Random(seed).shuffle(pairs)
    cut = round(len(pairs) * held_out_share)
    return _both_orders(pairs[cut:]), _both_orders(pairs[:cut])


def words() -> tuple[list[str], list[str]]:
    """What the tokenizer has to know: the words, and the parts that follow a hyphen."""
    texts = [speak(n) for speak in (english, french) for n in range(2 * LIMIT - 1)]
    pieces = [word.split("-") for text in texts for word in text.split()]
    return (
        sorted({first for first, *_ in pieces} | {"plus"}),
        sorted({f"-{part}" for _, *rest in pieces for part in rest}),
    )


def _both_orders(pairs: list[tuple[int, int]]) -> list[Sum]:
    ordered = [pair for a, b in pairs for pair in {(a, b): None, (b, a): None}]
    return [
        Sum(f"{english(a)} plus {english(b)}", english(a + b), french(a + b)) for a, b in ordered
    ]
