"""Writes the tables of README.md: `python scripts/make_benchmark_tables.py`.

The figures are those of benchmarks/results. Each table stands between `<!-- table NAME -->` and
`<!-- end -->`; nothing else is touched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"

Row = list[str]


def peers(found: dict[str, Any]) -> list[Row]:
    """trimtab and its peers, each with what it reaches; what failed stays in, with the reason."""
    rows = [["", "tokens/s", "GPU memory", "prompt of 2,048 tokens", "loading"]]
    for name, way in found["ways"].items():
        if "failed" in way:
            rows.append([name, str(way["failed"]), "", "", ""])
            continue
        rows.append(
            [
                name,
                number(way["tokens_per_second"]),
                f"{way['peak'] / 2**30:.2f} GiB",
                f"{way['prefill_s']:.2f} s" if "prefill_s" in way else "",
                f"{way['load_s']:.1f} s" if "load_s" in way else "",
            ]
        )
    return rows


def decode(found: dict[str, Any]) -> list[Row]:
    """Captured against eager decoding, and what is reached of the floor."""
    rows = [
        [
            "layers streamed",
            "tokens/s, eager",
            "captured",
            "captured, adapter off",
            "share of the floor",
            "tokens and logits",
        ]
    ]
    for share in found["shares"]:
        one = found[share]
        rows.append(
            [
                streamed(share, one),
                number(one["eager"]["per_second"]),
                number(one["captured"]["per_second"]),
                number(one["without adapter"]),
                f"{one['share']:.3f}",
                "equal to resident" if one["equal"] else "DIFFER",
            ]
        )
    return rows


def streamed(share: str, one: dict[str, Any]) -> str:
    """How many layers are streamed; of a budget, how many that makes."""
    if share.endswith("GiB"):
        return f"{one['modes']['streamed']}, for {share.removesuffix('GiB')} GiB in all"
    return "none" if share == "resident" else share


def number(value: float) -> str:
    """Three digits, or as many as stand before the point."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], list[Row]]]] = {
    "peers": ("peers-32-layers-nf4-h200.json", peers),
    "peers with double quantization": ("peers-8-layers-nf4-dq-h200.json", peers),
    "decoding": ("decode-h200.json", decode),
    "decoding of E4B": ("decode-e4b-h200.json", decode),
}


def table(name: str) -> str:
    """A table with a line before it that says what was measured, where and with which code."""
    file, rows_of = TABLES[name]
    found = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    head, *body = rows_of(found)
    lines = [
        f"{found['machine']}; {found['shape']}; link {found['link_gbps']:.1f} GB/s "
        f"([raw figures](benchmarks/results/{file}), code of {found['code']}):",
        "",
        "| " + " | ".join(head) + " |",
        "| " + " | ".join("---" for _ in head) + " |",
        *("| " + " | ".join(row) + " |" for row in body),
    ]
    return "\n".join(lines)


def render(text: str) -> str:
    """The README with its tables as the results have them."""
    for name in TABLES:
        pattern = re.compile(rf"(<!-- table {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        assert len(pattern.findall(text)) == 1, f"README.md has no place for the table {name}"
        made = table(name)
        text = pattern.sub(lambda found, made=made: found[1] + made + found[2], text)  # type: ignore[misc]
    return text


def main() -> None:
    README.write_text(render(README.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{len(TABLES)} tables in {README.name}")


if __name__ == "__main__":
    main()
