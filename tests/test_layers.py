"""The shape of the source: imports go down only, functions stay small, tests mirror files."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "trimtab"

LAYERS = (
    ("words", ["errors", "memory"]),
    ("foreign", ["foreign", "foreign_generate", "foreign_peft"]),
    ("formats", ["formats"]),
    ("facts", ["hardware", "headers", "checkpoint"]),
    ("decision, as data", ["plan"]),
    ("shape", ["naming", "quantize", "skeleton", "outline", "complete", "fields", "adapters"]),
    ("decision", ["devicemap", "compat", "filekeys", "fit"]),
    ("decision", ["costs", "drafts", "reasons", "forecast", "planner"]),
    ("machinery", ["store", "disk", "lanes", "stream", "fakes"]),
    ("machinery", ["guard", "park", "intake", "rooms"]),
    (
        "action",
        [
            "readahead",
            "uploads",
            "loading",
            "caches",
            "sampling",
            "lora",
            "lora_kernels",
            "replay",
            "activity",
            "decode",
            "adapted",
            "trial",
            "proof",
            "apply",
            "merging",
            "switching",
            "shelf",
            "swapping",
            "report",
        ],
    ),
    ("action", ["shards", "keys", "deltas", "changes", "partial", "saving"]),
    ("action", ["prompts", "placement", "place", "attach"]),
    ("entry", ["api", "bench"]),
    ("counsel", ["diagnosis"]),
    ("package", ["__init__"]),
    ("entry", ["merge"]),
    ("counsel", ["repro"]),
    ("surface", ["cli", "__main__"]),
)
"""From the bottom up. A file imports lower layers, and those of its own that stand before it."""

NOT_COUNSEL = ("machinery", "action", "entry")
"""Layers that `diagnosis` must not import, not through others either: it loads nothing."""

SURFACE_ONLY = {"typer", "rich", "pydantic", "click"}
FOREIGN = ("transformers", "peft", "accelerate", "bitsandbytes", "torch")

TORCH_PRIVATE = {
    "guard": {"_make_subclass", "_pytree", "_C", "_nn", "_parse_to", "_version"},
    "park": {"_parameters", "_buffers", "_modules", "_pytree"},
    "replay": {"_pytree"},
    "rooms": {"_parameters"},
}
"""Private names that the machinery needs by its nature, by file; all others: `foreign.py`."""

OURS = "_trim_"
"""Attributes that we give to other libraries' objects begin so."""

WHOLE = {
    "corruption",
    "untrusted",
    "layers",
    "matrix",
    "place_mechanisms",
    "planner_maps",
    "decode_options",
    "merge_files",
    "merge_refusals",
    "attach_refusals",
    "stored",
    "stream_races",
    "situations",
    "cases",
    "real",
    "package",
    "cli.with_a_gpu",
}
"""Tests of more than one file, or of a part of one: `test_<name>.py` without a `<name>.py`."""

MAX_FILE, MAX_FUNCTION = 400, 60


@dataclass(frozen=True)
class File:
    """A source file: its dotted name below `trimtab`, and what it says."""

    path: Path
    module: str
    tree: ast.Module

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


@functools.cache
def files() -> tuple[File, ...]:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        module = ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)
        found.append(File(path, module, ast.parse(path.read_text(encoding="utf-8"))))
    return tuple(found)


def running_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those below `if TYPE_CHECKING:`, which never run."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            yield from (node for one in child.orelse for node in running_nodes(one))
        else:
            yield child
            yield from running_nodes(child)


def imported(file: File) -> set[str]:
    """Full names of what the file imports, at its top or inside a function; `a.b` of `from a`."""
    names: set[str] = set()
    for node in running_nodes(file.tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.path.name}:{node.lineno}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            argument = node.args[0]
            if isinstance(argument, ast.Constant):
                names.add(f"{argument.value}.")
    return names


def own_imports(file: File) -> set[str]:
    """Modules of trimtab that the file imports, by the longest name that is one."""
    known = {one.module for one in files()}
    modules = set()
    for name in imported(file):
        package, _, rest = name.partition(".")
        if package != "trimtab":
            continue
        parts = [part for part in rest.split(".") if part]
        while parts and ".".join(parts) not in known:
            parts.pop()
        modules.add(".".join(parts) or "__init__")
    return modules


def rank(top: str) -> int:
    return [name for _, names in LAYERS for name in names].index(top)


def test_every_file_has_a_layer() -> None:
    listed = [name for _, names in LAYERS for name in names]
    assert len(listed) == len(set(listed))
    assert {file.top for file in files()} <= set(listed)


def test_imports_go_down_only() -> None:
    upward = [
        f"{file.module} imports {other}"
        for file in files()
        for other in sorted(own_imports(file))
        if other.partition(".")[0] != file.top and rank(other.partition(".")[0]) > rank(file.top)
    ]
    assert upward == []


def test_no_import_is_circular() -> None:
    graph = {file.module: own_imports(file) - {file.module} for file in files()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_counsel_never_imports_the_machinery() -> None:
    graph = {file.module: own_imports(file) for file in files()}
    reached: set[str] = set()
    waiting = [name for name in graph if name.partition(".")[0] == "diagnosis"]
    while waiting:
        name = waiting.pop()
        waiting += graph.get(name, set()) - reached
        reached.add(name)
    machinery = {name for layer, names in LAYERS if layer in NOT_COUNSEL for name in names}
    assert {name.partition(".")[0] for name in reached} & machinery == set()


def test_the_engine_needs_no_package_of_the_surface() -> None:
    for file in files():
        if file.top != "cli":
            packages = {name.partition(".")[0] for name in imported(file)}
            assert packages & SURFACE_ONLY == set(), file.module


def test_private_names_of_others_stand_in_foreign() -> None:
    ours = {name for file in files() for name in defined_names(file.tree)}
    outside = [
        f"{file.path.relative_to(ROOT)}:{line}: {name}"
        for file in files()
        if not file.top.startswith("foreign")
        for line, name in private_uses(file)
        if name not in ours
        and not name.startswith(OURS)
        and name not in TORCH_PRIVATE.get(file.top, set())
    ]
    assert outside == []


def defined_names(tree: ast.AST) -> Iterator[str]:
    """Names that the file itself gives to a function, class, variable or attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            # `self._x = ...` is ours; `module._x = ...` may be a way into somebody else's object.
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg


def private_uses(file: File) -> Iterator[tuple[int, str]]:
    for node in ast.walk(file.tree):
        names: Sequence[str] = ()
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(FOREIGN):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ACCESSORS:
            names = [str(one.value) for one in node.args[1:2] if isinstance(one, ast.Constant)]
        line = getattr(node, "lineno", 0)
        yield from ((line, name) for name in names if re.match(r"_[^_]", name))


ACCESSORS = ("getattr", "setattr", "hasattr", "delattr")


def test_files_and_functions_stay_small() -> None:
    long = []
    for file in files():
        lines = len(file.path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE:
            long.append(f"{file.path.relative_to(ROOT)}: {lines} lines")
        for node in ast.walk(file.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = length(node)
                if lines > MAX_FUNCTION:
                    long.append(f"{file.path.relative_to(ROOT)}: {node.name}: {lines} lines")
    assert long == []


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring, which is long where the interface is public."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node) is not None:
        first = node.body[0]
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def test_no_file_is_a_drawer() -> None:
    drawers = {"utils", "util", "helpers", "common", "misc"}
    assert [file.module for file in files() if drawers & set(file.module.split("."))] == []


def test_tests_mirror_the_source() -> None:
    sources = {file.module for file in files()}
    sources |= {path.stem for path in (ROOT / "scripts").rglob("*.py")}
    sources |= {path.stem for path in (ROOT / "tests").glob("*.py")}
    strays = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        folders = path.relative_to(ROOT / "tests").parent.parts
        subject = ".".join([*folders, path.stem.removeprefix("test_")])
        if subject not in sources | WHOLE:
            strays.append(str(path.relative_to(ROOT)))
    assert strays == []


def test_importing_trimtab_is_light() -> None:
    heavy = ["torch", "transformers", "peft", "accelerate", "bitsandbytes", "rich", "typer"]
    code = f"import sys, trimtab; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_exist() -> None:
    import trimtab

    for name in trimtab.__all__:
        assert getattr(trimtab, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = trimtab.nothing


def test_importing_a_file_does_not_hide_the_function_of_its_name() -> None:
    code = "import trimtab, trimtab.plan, trimtab.attach; print(trimtab.plan, trimtab.attach)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("<function plan ")
    assert "<function attach " in done.stdout
