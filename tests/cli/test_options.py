"""`trimtab.cli.options`: what the options mean to the engine."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import typer

from trimtab.cli import main
from trimtab.cli.options import Planning, Running, adapter_named, spread
from trimtab.errors import AdapterFault, MemoryFault


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (["sql=./sql-lora"], {"sql": "./sql-lora"}),
        (["./sql-lora"], {"sql-lora": "./sql-lora"}),
        (["./sql-lora/"], {"sql-lora": "./sql-lora/"}),
        (["me/my.lora v2"], {"my-lora-v2": "me/my.lora v2"}),
        (["a/x", "b/x", "c/x"], {"x": "a/x", "x-2": "b/x", "x-3": "c/x"}),
        (["./base"], {"base-adapter": "./base"}),
        (["./r=8/lora"], {"lora": "./r=8/lora"}),
        (["fr=./r=8/lora"], {"fr": "./r=8/lora"}),
    ],
)
def test_adapters_have_names(asked: list[str], expected: dict[str, str]) -> None:
    assert Planning(model="m", adapter=asked).adapters() == expected


def test_a_path_that_exists_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r=8").mkdir()
    assert Planning(model="m", adapter=["r=8"]).adapters() == {"r-8": "r=8"}


def test_a_dot_is_named_after_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sql").mkdir()
    monkeypatch.chdir(tmp_path / "sql")
    assert Planning(model="m", adapter=["."]).adapters() == {"sql": "."}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["a=x", "a=y"], "the name 'a' is given twice"),
        (["base=x"], "the name 'base' means no adapter"),
        (["s.q=x"], "the name of an adapter has letters, digits, - and _ only"),
        (["sql="], "the name of an adapter"),
    ],
)
def test_names_that_cannot_be(asked: list[str], message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        Planning(model="m", adapter=asked).adapters()


def test_arguments_are_those_of_plan() -> None:
    from trimtab.api import plan

    arguments = Planning(model="m", gpu="6GiB", cpu="1GB").arguments()
    assert set(arguments) | {"hardware"} == set(inspect.signature(plan).parameters)
    assert (arguments["gpu"], arguments["cpu"], arguments["disk"]) == (6 * 2**30, 10**9, None)
    assert (arguments["quant"], arguments["modalities"]) == ("auto", ("text",))
    assert {"context": 4096, "batch": 1, "dtype": "auto"}.items() <= arguments.items()


@pytest.mark.parametrize("size", ["-1", "abc", "6 potatoes", "6GiBB", ""])
def test_a_wrong_size_is_wrong_usage(size: str) -> None:
    with pytest.raises(MemoryFault, match="is not a size") as caught:
        Planning(model="m", cpu=size).arguments()
    assert (caught.value.code, caught.value.exit_code) == ("TT402", 2)


def test_a_device_map_is_read(tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    file.write_text('{"": 0, "model.vision_tower": "cpu"}')
    assert Planning(model="m", device_map=file).arguments()["device_map"] == {
        "": 0,
        "model.vision_tower": "cpu",
    }
    file.write_text("{")
    with pytest.raises(typer.BadParameter, match=r"map\.json is not JSON"):
        Planning(model="m", device_map=file).arguments()
    file.write_text("[1]")
    with pytest.raises(typer.BadParameter, match="holds no object of module names"):
        Planning(model="m", device_map=file).arguments()


def test_a_saved_plan_has_the_options_of_planning(tmp_path: Path) -> None:
    asked = Running(model="m", plan=tmp_path / "plan.json", gpu="6GiB", context=8, json=True)
    with pytest.raises(typer.BadParameter, match="has its own --gpu, --context"):
        asked.saved_plan()


def test_a_file_that_is_no_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    for text in ("{", "[]", '{"schema_version": 99}', '{"schema_version": 1, "x": 2}'):
        file.write_text(text)
        with pytest.raises(typer.BadParameter, match="is not a plan that"):
            Running(model="m", plan=file).saved_plan()


def test_who_answers() -> None:
    assert Running(model="m").chosen(()) is None
    assert Running(model="m").chosen(("a", "b")) == "a"
    assert Running(model="m", use="b").chosen(("a", "b")) == "b"
    assert Running(model="m", use="base").chosen(("a", "b")) is None
    with pytest.raises(AdapterFault, match="no adapter named 'c' is loaded; loaded: a, b"):
        adapter_named("c", ("a", "b"))


def test_spread_gives_a_command_its_signature() -> None:
    @spread(Planning)
    def command(asked: Planning, *, more: int = 3) -> tuple[str, int]:
        """Says so."""
        return asked.model, more

    names = list(inspect.signature(command).parameters)
    assert (names[0], names[-1]) == ("model", "more")
    assert command.__doc__ == "Says so."
    assert command(model="m", more=4) == ("m", 4)


def test_bench_takes_no_length_of_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "m", "--max-new-tokens", "2"]) == 2
    assert "--max-new-tokens" in capsys.readouterr().err
