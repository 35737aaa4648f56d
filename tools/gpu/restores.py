"""Restores over PCIe: an engine's prompt from pinned host memory, and KVPR's table (tools/gpu/kvpr.py)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from typing import Any

from headrace import LLM, SamplingParams
from tests.support.offloading import MIXES, counters, flush, forced, watched
from tests.support.traces import Trace, same
from tools.gpu import sessions, timing
from tools.gpu.engine import release
from tools.gpu.models import MODELS, drawn_model
from tools.gpu.runner import Case, Goal, LeftOut, Row

SECONDS, RATES_SECONDS = 24.0, 4.0
"""For KVPR's table, and for a tier's rates."""
GOALS = (Goal("less", 0.3), Goal("over_best", 0.03, most=True), Goal("prediction_off", 0.1, most=True))
"""Less time than by loading everything; of the solver's split over the best of a sweep; of what it predicts."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def cases() -> Iterator[Case]:
    for name in ("S1", "8B"):
        yield Case(f"{name} restored", partial(restored, name))
        release()
    yield Case("KVPR's table", table, 2 * SECONDS)
    yield Case("a tier's rates", rates)


def restored(name: str, length: int = 8192, rounds: int = 3, gib: float = 6.0) -> Row:
    """First token of a prompt that is computed, of one whose chunks all come from host memory, and of one of whose
    chunks the solver chooses which are computed: the same bits. Raises LeftOut where a GPU's engine has no tiers."""
    model = drawn_model(MODELS[name], timing.CUDA)
    try:
        llm = model.engine(kv_offloading_size=gib, max_sequences=4)
    except ValueError as why:
        raise LeftOut(str(why)) from None
    with llm:
        prompts = [sessions.drawn_tokens(length, llm.capacity.vocab_size) for _ in range(rounds + 1)]
        computed = median([sessions.first_token_s(llm, prompt) for prompt in prompts][1:])
        truth = watched(llm, [prompts[0]], GREEDY)
        chosen, _ = fetched(llm, prompts[0], truth, rounds)
        assert llm.engine.offload is not None
        llm.engine.offload.choose = forced(*MIXES["load"])
        loaded, read = fetched(llm, prompts[0], truth, rounds)
    figures = {"computed_ms": 1e3 * computed, "loaded_ms": 1e3 * loaded, "chosen_ms": 1e3 * chosen}
    figures |= {"gain": computed / chosen, "read_mb": read / 1e6, "loaded_gbps": read / loaded / 1e9}
    return Row(f"{name} restored {length:,}", figures)


def fetched(llm: LLM, prompt: list[int], truth: list[Trace], rounds: int) -> tuple[float, int]:
    """Seconds to the first token of a prompt of which nothing is left in the pool, and bytes loaded from host memory
    for it. Raises AssertionError for other bits than `truth`."""
    flush(llm)
    before = counters(llm).loaded_tokens
    same(watched(llm, [prompt], GREEDY), truth)
    read = (counters(llm).loaded_tokens - before) * llm.capacity.kv_bytes_per_token
    found = []
    for _ in range(rounds):
        flush(llm)
        found.append(sessions.first_token_s(llm, prompt))
    return median(found), read


def table() -> list[Row]:
    """KVPR's, a row for each shape."""
    rows = []
    for found in beside("kvpr").table(SECONDS)["rows"]:
        figures = {name: value for name, value in found.items() if name != "shape"}
        rows.append(Row(found["shape"], figures | {"prediction_off": abs(found["prediction"])}, GOALS))
    return rows


def rates() -> list[Row]:
    """At which chunks leave a GPU's pool for pinned memory and come back, beside the link."""
    found = beside("tier_rates").table(RATES_SECONDS)
    return [Row(f"chunks of {name}", {**row, "link_gbps": found["link_gbps"]}) for name, row in found["rows"].items()]


def beside(name: str) -> Any:
    """A module of this folder. Raises LeftOut where there is none."""
    if find_spec(f"tools.gpu.{name}") is None:
        raise LeftOut(f"tools/gpu/{name}.py is missing")
    return import_module(f"tools.gpu.{name}")
