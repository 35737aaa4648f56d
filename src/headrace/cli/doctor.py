"""`headrace doctor`: the verdict, then the findings of headrace.doctor; all of them with -v or --json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from headrace.console import Trimmed, out, working
from headrace.doctor import machine
from headrace.doctor.model import check_model
from headrace.doctor.verdict import Found, Warned, headline, warnings
from headrace.planner.machine import count_of

NO_OPERATIONS = ("C++ kernels", "C++ instructions here", "Triton kernels")
"""Rows of the kernels' section that are none."""


def run(model: str | None, as_json: bool, verbose: bool = False) -> None:
    """Prints the findings. Raises ValueError where the model cannot be served here."""
    with working("looking at the machine"):
        found: Found = ({"model": {"name": model} | check_model(model)} if model else {}) | machine.findings()
    warned = warnings(found)
    if as_json:
        told = [{"finding": each.finding, "remedy": each.remedy} for each in warned]
        verdict = {"verdict": "WARN" if warned else "OK", "warnings": told}
        print(json.dumps(verdict | found, indent=1, default=str))
        return
    show(out, found, warned, verbose)


def show(console: Console, found: Found, warned: list[Warned], verbose: bool) -> None:
    """Prints the screen."""
    word, _, rest = headline(found, warned).partition(":")
    console.print(Text.assemble((f"{word}:", "bold yellow" if warned else "bold green"), rest))
    for each in warned:
        console.print(Text(f"  - {each}"))
    for part in _everything(found) if verbose else _summary(found):
        console.print(part if isinstance(part, str) else Trimmed(part), end="\n" if isinstance(part, str) else "")


def _summary(found: Found) -> Iterator[RenderableType]:
    yield ""
    yield rows_of(_machine(found))
    if "model" in found:
        yield ""
        yield rows_of(_model(found["model"]))
        yield from _requests(found["model"])
    yield ""
    yield "-v shows every finding, --json all of them as one object"


def _machine(found: Found) -> Iterator[tuple[str, str]]:
    facts, memory, software = found["processor"], found["memory"], found["software"]
    cores, threads = count_of(facts["cores usable"], "core"), count_of(facts["torch threads"], "thread")
    yield "processor", f"{facts['name']}, {cores} usable, {threads}"
    bandwidth = f"read at {memory['read bandwidth GB/s']:,.1f} GB/s"
    yield "memory", f"{memory['free GiB']:,.1f} of {memory['total GiB']:,.1f} GiB free, {bandwidth}"
    yield "accelerator", _joined(found["accelerators"], "CUDA", " ")
    yield from kernel_rows(found["kernels"])
    yield "ranks", str(found["ranks"].get("by the environment's settings", found["ranks"].get("ranks")))
    yield "tiers", _joined(found["tiers"], "tiers", " ")
    yield "settings", _joined(found["settings"], "variables", "=")
    names = ("headrace", "python", "torch", "transformers")
    yield "software", ", ".join(f"{name} {software[name]}" for name in names)


def _joined(rows: dict[str, Any], alone: str, between: str) -> str:
    """The rows in one line; of the row called `alone` its value only."""
    return "; ".join(str(what) if name == alone else f"{name}{between}{what}" for name, what in rows.items())


def kernel_rows(kernels: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Operations by implementation: where all have the same one their number, else their names."""
    ways: dict[str, list[str]] = {}
    for name, what in kernels.items():
        if name not in NO_OPERATIONS:
            ways.setdefault(str(what).split(",")[0], []).append(name)
    for way, names in ways.items():
        told = f"all {len(names)} operations" if len(ways) == 1 and len(names) > 1 else ", ".join(names)
        yield "kernels" if way == next(iter(ways)) else "", f"{told}: {way.replace('cpu: ', '')}"


def _model(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    layers, heads, kv_heads, size = facts["layers, query heads, KV heads, head size"].split(", ")
    yield (
        "model",
        f"{facts['architecture']}, {layers} layers, {heads} heads and {kv_heads} KV heads of {size}, "
        f"vocabulary {facts['vocabulary']}, {facts['tokenizer'].replace('none', 'no tokenizer')}",
    )
    yield "weights", f"{facts['weights GiB']} GiB ({facts['weights bytes']:,} bytes), {facts['type of the weights']}"
    yield "KV per token", f"{kv_per_token(facts)} (--kv-cache-dtype int8)"
    yield "longest context", longest_context(facts)
    yield "KV cache", f"{facts['KV cache tokens']:,} tokens, {facts['KV cache is sized by']}"


def kv_per_token(facts: dict[str, Any]) -> str:
    own = f"{facts['KV bytes per token (as computed)']} bytes in {facts['KV type as computed']}"
    return f"{own}, {facts['KV bytes per token (int8)']} in int8"


def longest_context(facts: dict[str, Any]) -> str:
    limit, context = facts["longest context is limited by"], facts["context tokens"]
    told = f"{facts['longest context here']:,} tokens, limited by {limit}"
    if limit == "the model":
        return told
    wanted = min(facts["KV cache tokens at most"], int(context.replace(",", "")))
    more = f"; --kv-cache-tokens {wanted} for more" if limit == "memory" else ""
    return f"{told}, of the model's {context}{more}"


def _requests(facts: dict[str, Any]) -> Iterator[RenderableType]:
    rows = facts["requests at once"]
    if not rows:
        return
    yield ""
    yield "requests at once, by tokens of each with its answer (more where prompts begin alike)"
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="")
    for name in rows[0]:
        table.add_column(name.removeprefix("by default, "), justify="right")
    for row in rows:
        table.add_row(*(f"{value:,}" for value in row.values()))
    yield Padding(table, (0, 0, 0, 2), expand=False)
    yield f"  at most {facts['sequences at once']:,} run at once (--max-sequences)"


def _everything(found: Found) -> Iterator[RenderableType]:
    for title, rows in found.items():
        yield ""
        yield title
        yield Padding(rows_of((name, _shown(value)) for name, value in rows.items() if not isinstance(value, list)),
                      (0, 0, 0, 2), expand=False)  # fmt: skip
        if title == "model":
            yield from _requests(rows)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def rows_of(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return table
