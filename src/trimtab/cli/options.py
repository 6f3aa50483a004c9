"""The options that commands share, as two dataclasses, and what they mean to the engine."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from trimtab.errors import AdapterFault, TrimtabError
from trimtab.memory import parse_size
from trimtab.plan import Plan

BASE = "base"
"""What `--use` and `/adapter` call the model without an adapter."""


class Quant(StrEnum):
    nf4 = "nf4"
    nf4_dq = "nf4-dq"
    fp4 = "fp4"
    fp4_dq = "fp4-dq"
    int8 = "int8"
    none = "none"
    auto = "auto"


class Modality(StrEnum):
    text = "text"
    image = "image"
    video = "video"
    audio = "audio"


def _option(help_text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help_text, **{"show_default": False, **more})


_FILE: dict[str, Any] = {"exists": True, "dir_okay": False, "metavar": "FILE"}
_SIZE: dict[str, Any] = {"metavar": "SIZE"}
AsJson = Annotated[bool, _option("Print an object with schema_version instead.", "--json")]


@dataclass(frozen=True, kw_only=True)
class Planning:
    """What `trimtab.plan` is asked, as options."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, or a name on the hub.")]
    adapter: Annotated[
        list[str] | None,
        _option("A PEFT adapter: a folder or a hub name; repeatable.", metavar="[NAME=]PATH"),
    ] = None
    quant: Annotated[
        Quant, _option("Format of the linears; auto: as they are stored.", show_default=True)
    ] = Quant.auto
    gpu: Annotated[str | None, _option("GPU memory; default: what is free.", **_SIZE)] = None
    cpu: Annotated[str | None, _option("RAM; default: 80 % of what is free.", **_SIZE)] = None
    disk: Annotated[
        str | None,
        _option("Room on the disk; default: none, or what is free if the map names it.", **_SIZE),
    ] = None
    context: Annotated[
        int, _option("Tokens of prompt and answer to plan for.", min=1, show_default=True)
    ] = 4096
    batch: Annotated[int, _option("Sequences at a time.", min=1, show_default=True)] = 1
    modality: Annotated[
        list[Modality] | None, _option("What prompts hold; repeatable; default: text.")
    ] = None
    device_map: Annotated[
        Path | None, _option("A Hugging Face device map in JSON, obeyed.", **_FILE)
    ] = None
    adapter_memory: Annotated[
        str | None,
        _option("GPU memory of adapters; the others rest in RAM; default: all stay.", **_SIZE),
    ] = None
    dtype: Annotated[str, _option("Computed in, as bfloat16; auto: the config's.")] = "auto"
    json: AsJson = False

    def adapters(self) -> dict[str, str]:
        """Name to path of the adapters asked for."""
        found: dict[str, str] = {}
        for asked in self.adapter or ():
            name, path = _named(asked)
            name = name or _free_name(path, found)
            if name in found or name == BASE:
                raise typer.BadParameter(
                    f"the name {name!r} "
                    + ("means no adapter" if name == BASE else "is given twice"),
                    param_hint="--adapter",
                )
            found[name] = path
        return found

    def arguments(self) -> dict[str, Any]:
        """The arguments of `trimtab.plan`, checked as far as it goes without a model.

        Raises:
            MemoryFault: TT402, with the exit code of a wrong usage.
        """
        with as_usage():
            sizes = {
                name: parse_size(getattr(self, name))
                for name in ("gpu", "cpu", "disk", "adapter_memory")
            }
        return {
            "model": self.model,
            "adapters": self.adapters(),
            "quant": self.quant.value,
            **sizes,
            "context": self.context,
            "batch": self.batch,
            "modalities": tuple(one.value for one in self.modality or (Modality.text,)),
            "device_map": read_map(self.device_map),
            "dtype": self.dtype,
        }


@dataclass(frozen=True, kw_only=True)
class Running(Planning):
    """What loading and generating are asked, as options."""

    plan: Annotated[
        Path | None,
        _option("Carry out what `plan --save` wrote, for this MODEL.", **_FILE),
    ] = None
    disk_folder: Annotated[
        Path | None,
        _option("Where the disk tier lies; default: a temporary folder.", metavar="FOLDER"),
    ] = None
    allow_unused: Annotated[
        bool, _option("Accept adapters with tensors that match nothing.", "--allow-unused")
    ] = False
    allow_other_base: Annotated[
        bool, _option("Accept adapters that name another base.", "--allow-other-base")
    ] = False
    use: Annotated[
        str | None,
        _option("The adapter that answers; base: none; default: the first.", metavar="NAME|base"),
    ] = None

    def saved_plan(self) -> Plan | None:
        """The plan of `--plan`, for MODEL; None without one."""
        if self.plan is None:
            return None
        changed = [
            "--" + one.name.replace("_", "-")
            for one in fields(Planning)
            if one.name not in ("model", "json") and getattr(self, one.name) != one.default
        ]
        if changed:
            raise typer.BadParameter(
                f"a saved plan has its own {', '.join(changed)}", param_hint="--plan"
            )
        try:
            return replace(Plan.load(self.plan), model=self.model)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise typer.BadParameter(
                f"{self.plan} is not a plan that `trimtab plan --save` wrote: {error}",
                param_hint="--plan",
            ) from None

    def chosen(self, loaded: tuple[str, ...]) -> str | None:
        """The adapter that answers, of those that are loaded; None for the base."""
        if self.use is None:
            return loaded[0] if loaded else None
        return adapter_named(self.use, loaded)


@dataclass(frozen=True, kw_only=True)
class Answering(Running):
    """What a command that answers is asked, too."""

    max_new_tokens: Annotated[
        int | None, _option("The most tokens of an answer; default: 200, if there is room.", min=1)
    ] = None


def adapter_named(name: str, loaded: tuple[str, ...]) -> str | None:
    """An adapter by the name that a user gives; None for `base`.

    Raises:
        AdapterFault: TT311, if there is none of that name.
    """
    if name == BASE:
        return None
    if name not in loaded:
        raise AdapterFault(
            "TT311",
            f"no adapter named {name!r} is loaded; loaded: {', '.join(loaded) or 'none'}",
            fix=f"one of {', '.join((*loaded, BASE))}",
        )
    return name


@contextlib.contextmanager
def as_usage() -> Iterator[None]:
    """An error inside is the command line's: it ends with the exit code of a wrong usage."""
    try:
        yield
    except TrimtabError as error:
        error.exit_code = 2
        raise


def read_map(path: Path | None) -> dict[str, Any] | None:
    """The device map in a JSON file."""
    if path is None:
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise typer.BadParameter(
            f"{path} is not JSON: {error}", param_hint="--device-map"
        ) from None
    if not isinstance(found, Mapping):
        raise typer.BadParameter(
            f"{path} holds no object of module names", param_hint="--device-map"
        )
    return dict(found)


def _named(asked: str) -> tuple[str, str]:
    name, equals, path = asked.partition("=")
    if not equals or Path(asked).expanduser().exists():
        return "", asked
    if re.fullmatch(r"[0-9A-Za-z_-]+", name) and path:
        return name, path
    if re.search(r"[/\\]", name):
        return "", asked
    raise typer.BadParameter(
        f"{asked!r}: the name of an adapter has letters, digits, - and _ only, then =PATH",
        param_hint="--adapter",
    )


def _free_name(path: str, taken: Mapping[str, str]) -> str:
    """A name from the folder's own, which PEFT can use as a module's name."""
    last = re.split(r"[/\\]", str(Path(path).expanduser()).rstrip("/\\"))[-1]
    if last in ("", ".", ".."):
        last = Path(path).resolve().name
    name = re.sub(r"[^0-9A-Za-z_-]+", "-", last).strip("-") or "adapter"
    name = f"{name}-adapter" if name == BASE else name
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(one for one in names if one not in taken)


def spread(options: type[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a command of `f(asked, *, ...)`: its options are the fields of `options`, then its own.

    typer reads a command's options from its signature; this writes them there.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        hints = get_type_hints(options, include_extras=True)
        own = get_type_hints(command, include_extras=True)
        shared = [
            inspect.Parameter(
                one.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if one.name == "model" else one.default,
                annotation=hints[one.name],
            )
            for one in fields(options)
        ]
        further = [
            one.replace(annotation=own[name])
            for name, one in list(inspect.signature(command).parameters.items())[1:]
        ]

        @functools.wraps(command)
        def spread_out(**given: Any) -> Any:
            mine = {one.name: given.pop(one.name) for one in further}
            return command(options(**given), **mine)

        spread_out.__signature__ = inspect.Signature([*shared, *further])  # type: ignore[attr-defined]
        spread_out.__annotations__ = {one.name: one.annotation for one in (*shared, *further)}
        del spread_out.__wrapped__
        return spread_out

    return decorate
