"""The words of every error in the source: `python tests/error_texts.py` writes error_texts.txt.

A line for each `what`, `why` and `fix`, with `{}` for what is filled in: a change of an error's
text is seen in the change that makes it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
SOURCE = TESTS.parent / "src" / "trimtab"
TARGET = TESTS / "error_texts.txt"

Function = ast.FunctionDef | ast.AsyncFunctionDef


def texts() -> list[str]:
    """Sorted lines `file: CODE part: text`, of all faults and of what makes one of its words."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")}
    makers = {
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, Function) and re.search(r"(Fault|DoesNotFit)$", _returned(node))
    }
    lines = set()
    for path, tree in trees.items():
        for scope in ast.walk(tree):
            if isinstance(scope, Function):
                for told in _told(scope, makers):
                    lines.add(f"{path.relative_to(SOURCE).as_posix()}: {told}")
    return sorted(lines)


def _returned(node: Function) -> str:
    return ast.unparse(node.returns) if node.returns else ""


def _told(scope: Function, makers: set[str]) -> Iterator[str]:
    assigned = [
        (node.lineno, target.id, node.value)
        for node in ast.walk(scope)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    for node in ast.walk(scope):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        first = node.args[0] if node.args else None
        code = first.value if isinstance(first, ast.Constant) else None
        if isinstance(code, str) and re.fullmatch(r"TT\d{3}", code) and name != "replace":
            parts = dict(zip(("what", "why", "fix"), node.args[1:], strict=False))
            parts |= {one.arg: one.value for one in node.keywords if one.arg in ("why", "fix")}
        elif name in makers:
            code = f"{name}()"
            parts = {str(at): one for at, one in enumerate(node.args)}
        else:
            continue
        for part, value in parts.items():
            if isinstance(value, ast.Name):  # what was last put into it
                before = [
                    one for at, name, one in assigned if name == value.id and at < node.lineno
                ]
                value = before[-1] if before else value
            text = _words(value)
            if re.search(r"[a-z]{3}", text):
                yield f"{code} {part}: {text}"


def _words(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_words(one) for one in node.values)
    if isinstance(node, ast.BinOp):
        return _words(node.left) + _words(node.right)
    if isinstance(node, ast.IfExp):
        return f"{_words(node.body)} | {_words(node.orelse)}"
    return "{}"


if __name__ == "__main__":
    TARGET.write_text("\n".join(texts()) + "\n", encoding="utf-8")
    print(f"{len(texts())} texts in {TARGET.name}")
