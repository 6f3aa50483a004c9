"""Writes docs/codes.md from the rules of trimtab.diagnosis: `python scripts/make_code_pages.py`."""

from __future__ import annotations

from pathlib import Path

from trimtab.diagnosis.registry import FAMILIES, codes, rule

TARGET = Path(__file__).resolve().parent.parent / "docs" / "codes.md"

HEAD = """# Codes

Every error and every finding of trimtab has a code. `trimtab explain CODE` prints its page; this
file holds all of them. It is made by `python scripts/make_code_pages.py`: change the rules in
`src/trimtab/diagnosis/rules/`, not this file.
"""


def render() -> str:
    """All pages as one Markdown text: a list of the codes by family, then the pages."""
    contents = []
    for family, name in FAMILIES.items():
        contents.append(f"\n{family}nn: {name}\n")
        contents += [f"- [{code}](#{code.lower()}) {rule(code).title}" for code in codes_of(family)]
    pages = [f'<a id="{code.lower()}"></a>\n\n{rule(code).markdown()}' for code in codes()]
    return "\n".join([HEAD.rstrip("\n"), *contents]) + "\n\n" + "\n".join(pages)


def codes_of(family: str) -> list[str]:
    return [code for code in codes() if code.startswith(family)]


def main() -> None:
    TARGET.write_text(render(), encoding="utf-8")
    print(f"{len(codes())} codes in {TARGET.name}")


if __name__ == "__main__":
    main()
