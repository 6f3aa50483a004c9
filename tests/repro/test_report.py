"""The report: a matrix, versions, a section for each case that is not as it should be."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from trimtab.repro.cases import Case, Subject
from trimtab.repro.failure import Failure
from trimtab.repro.matrix import Cell, Stack
from trimtab.repro.report import Report

HERE = str(Path.cwd())
SUBJECT = Subject(
    shown="my-model",
    model=f"{HERE}/my-model",
    adapter=f"{HERE}/my-lora",
    model_class="LlamaForCausalLM",
    dtype="bfloat16",
    here=0,
    device_map={"": 0, "model.layers.1": "cpu"},
    quants=("nf4-dq", "nf4"),
    notes=("a note",),
)
STACKS = [
    Stack("installed", ("python",), {"peft": "0.21.2", "torch": "2.13.0"}, {"A": "secret"}),
    Stack("peft 0.18.1", ("python",), {"peft": "0.18.1"}, {}),
]
FAILURE = Failure("KeyError", "2", "Traceback ...\nKeyError: 2", ({"code": "TT216"},), "peft", "Y.")


def cell(case: Case, stack: str, quant: str, fine: bool = True) -> Cell:
    made = Cell(case, stack, quant, "equal", "equal tokens", fine, "print(1)\n", 1.0)
    if fine:
        return made
    return dataclasses.replace(
        made,
        outcome="failed",
        verdict="KeyError: 2 [TT216]",
        codes=("TT216",),
        library="peft",
        why="Because.",
        failure=FAILURE,
    )


def report(stacks: int = 1, failing: tuple[Case, ...] = (Case.ADAPTER,)) -> Report:
    cells = [
        cell(case, stack.name, quant, case not in failing)
        for stack in STACKS[:stacks]
        for quant in SUBJECT.quants
        for case in Case
    ]
    return Report(SUBJECT, STACKS[:stacks], cells, 600)


def test_the_matrix() -> None:
    lines = report().markdown().splitlines()
    assert lines[0] == "# Adapter on a split base: my-model"
    assert lines[2].startswith("my-model, a LlamaForCausalLM, in bfloat16; GPU 0 runs.")
    assert lines[4:10] == [
        "| case | NF4, double quantization | NF4 |",
        "| --- | --- | --- |",
        "| all on one device, with the adapter | equal tokens | equal tokens |",
        "| split, no adapter | equal tokens | equal tokens |",
        "| split, with the adapter | KeyError: 2 [TT216] | KeyError: 2 [TT216] |",
        "| split, with the adapter and the same map for PEFT | equal tokens | equal tokens |",
    ]
    assert "- a note" in lines


def test_a_section_for_cells_of_a_row_that_say_the_same() -> None:
    text = report().markdown()
    assert text.count("\n## ") == 1
    assert text.endswith(
        "## Split, with the adapter\n\n"
        "With NF4, double quantization and NF4: KeyError: 2 [TT216].\n\n"
        "What is known of it: `trimtab explain TT216`.\n\n"
        "It likely belongs to peft. Because.\n\n"
        "```\nTraceback ...\nKeyError: 2\n```\n\n"
        "`split-adapter.py`, run as `python split-adapter.py MODEL ADAPTER`:\n\n"
        "```python\nprint(1)\n```\n"
    )


def test_several_stacks() -> None:
    text = report(stacks=2).markdown()
    assert "| NF4; installed | NF4, double quantization; peft 0.18.1 |" in text
    assert "| version | installed | peft 0.18.1 |\n| --- | --- | --- |\n" in text
    assert "| peft | 0.21.2 | 0.18.1 |\n| torch | 2.13.0 | not there |" in text
    both = "NF4, double quantization and NF4"
    assert f"With {both} on installed; with {both} on peft 0.18.1: KeyError: 2" in text


def test_nothing_of_this_machine() -> None:
    for text in (report().markdown(), json.dumps(report().to_dict())):
        assert HERE not in text
        assert "secret" not in text


def test_whether_our_own_case_is_as_it_should_be() -> None:
    assert report().ours
    assert not report(failing=(Case.TRIMTAB,)).ours
    # On other versions it may fail: they may be older than what is supported.
    mixed = report(stacks=2)
    cells = [*mixed.cells[:-1], cell(Case.TRIMTAB, "peft 0.18.1", "nf4", fine=False)]
    assert dataclasses.replace(mixed, cells=cells).ours


def test_an_object() -> None:
    told = report().to_dict()
    assert set(told) == {"model", "subject", "limit", "stacks", "cells", "trimtab_works"}
    assert told["model"] == "my-model"
    assert told["stacks"] == [{"name": "installed", "versions": STACKS[0].versions}]
    assert len(told["cells"]) == 10
    assert told["trimtab_works"] is True


def test_what_rests_where_is_in_the_cell() -> None:
    made = report()
    cells = [dataclasses.replace(one, rests={"gpu:0": 2**20, "disk": 0}) for one in made.cells]
    assert (
        "| equal tokens (1.00 MiB on gpu:0) |" in dataclasses.replace(made, cells=cells).markdown()
    )
