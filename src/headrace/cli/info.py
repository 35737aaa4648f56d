"""`headrace info`: a model in a few lines, or all of it with --json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from headrace.cli.doctor import kernel_rows, kv_per_token, longest_context, rows_of
from headrace.config import config_from_env
from headrace.console import Trimmed, out, working
from headrace.doctor.info import Facts, info
from headrace.host import GIB
from headrace.planner.machine import count_of

SCALES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


def run(model: str | None, as_json: bool, **settings: str | None) -> None:
    """Prints the facts. settings: those of the engine that were given. Raises ValueError where there is no model."""
    if model is None:
        raise ValueError("no model is given: headrace info MODEL, a folder or 'tiny'")
    given = {name: value for name, value in settings.items() if value is not None}
    with working("looking at the model, and timing a few layers of its size"):
        found = info(config_from_env(model=model, **given))
    if as_json:
        print(json.dumps({"name": model} | found, indent=1, default=str))
    else:
        show(out, model, found)


def show(console: Console, name: str, found: Facts) -> None:
    """Prints the screen."""
    console.print(Trimmed(rows_of([("model", _named(name, found)), *_rows(found)])), end="")


def _named(name: str, found: Facts) -> str:
    facts = found["model"]
    return f"{name}: {facts['architecture']}, {short(facts['parameters'])} parameters"


def _rows(found: Facts) -> Iterator[tuple[str, str]]:
    facts, file, memory = found["model"], found["file"], found["memory"]
    layers, heads, kv_heads, size = facts["layers, query heads, KV heads, head size"].split(", ")
    yield "", f"{layers} layers, {heads} heads and {kv_heads} KV heads of {size}, vocabulary {facts['vocabulary']}"
    stored = ", ".join(f"{sized(of)} in {kind}" for kind, of in file["stored as"].items())
    yield "file", f"{file['path']}, {count_of(file['files'], 'file')}: {stored}"
    fits = "" if memory["fits"] else ": it does not fit"
    yield "memory", f"{sized(memory['weights bytes'])} of weights, {sized(memory['free bytes'])} free{fits}"
    yield "KV per token", kv_per_token(memory)
    if "draft" in found:
        yield "draft model", _draft(found["draft"])
    if "recurrent states" in memory:
        each = sized(memory["bytes of a recurrent state"])
        yield "recurrent states", f"{memory['recurrent states']:,} of {each} each"
    yield "longest context", longest_context(memory | facts)
    yield from kernel_rows(found["kernels"])
    if "experts" in found["expected"]:
        yield "experts", found["expected"]["experts"]
    yield "a layer", found["expected"]["a layer"]
    yield from _speed(found)


def _draft(facts: dict[str, Any]) -> str:
    named = f"{facts['name']}: {facts['architecture']}, {short(facts['parameters'])} parameters"
    return f"{named}, {sized(facts['weights bytes'])} of weights, {facts['KV bytes per token']:,} bytes of KV per token"


def _speed(found: Facts) -> Iterator[tuple[str, str]]:
    speed = found["expected"]
    tokens, prefill, decode = speed["tokens"], speed["prefill tokens/s"], speed["decode tokens/s"]
    yield "prompts", f"about {prefill:,.0f} tokens a second: {tokens:,} in {tokens / prefill:,.2g} s"
    digits = 0 if decode >= 100 else 1 if decode >= 1 else 3
    yield "answers", f"about {decode:,.{digits}f} tokens a second behind {tokens:,}, one sequence alone"
    form = "" if speed["weights timed"] == "none" else f" in {speed['weights timed']}"
    yield "", f"timed now, on {count_of(speed['layers timed'], 'layer')} of random weights{form}"


def sized(bytes: int) -> str:
    """'1.40 GiB', '250.0 MiB', '40.0 KiB'."""
    if bytes >= GIB:
        return f"{bytes / GIB:,.2f} GiB"
    return f"{bytes / 2**20:,.1f} MiB" if bytes >= 2**20 // 10 else f"{bytes / 2**10:,.1f} KiB"


def short(number: int) -> str:
    """'1.24B', '596M'."""
    for scale, letter in SCALES:
        if number >= scale:
            return f"{number / scale:.3g}{letter}"
    return str(number)
