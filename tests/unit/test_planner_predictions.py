"""Predicted times, choices and partitions of every strategy, as they were when the model was last changed on purpose.

After such a change: python -m tests.unit.test_planner_predictions
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.planner.choice import choose, predict, shards_for
from headrace.planner.heuristic import Heuristic
from headrace.planner.shards import Prefill
from headrace.strategies import STRATEGIES
from tests.support.planner_oracles import GQA, MACHINE, S2

pytestmark = pytest.mark.unit

KEPT = Path(__file__).with_name("planner_predictions.json")
SLOW = msgspec.structs.replace(MACHINE, link_bytes_s=0.5e9, link_cpu_s_per_byte=0.2e-9)
MODELS = {"fast link, MHA": (MACHINE, S2), "slow link, GQA": (SLOW, GQA)}
LENGTHS = ((64, 0), (1000, 0), (16384, 0), (2048, 2048), (5000, 6400), (64, 32704), (300, 10304))
"""(new tokens, cached tokens)."""
HEURISTIC = Heuristic(-0.1, 0.2, 0.3)


def cases() -> list[tuple[str, str, int, int, int, list[float] | None]]:
    """(name, model, ranks, T, P, cached_on)."""
    return [
        (f"{model}: {T} on {P}, {ranks} ranks{'' if on is None else ', one-sided'}", model, ranks, T, P, on)
        for model in MODELS
        for ranks in (1, 2, 3)
        for T, P in LENGTHS
        for on in (None, [float(rank) for rank in range(ranks)])
        if on is None or P
    ]


def found(model: str, ranks: int, T: int, P: int, on: list[float] | None) -> dict[str, Any]:
    """By strategy: [seconds, *bounds]; by rule: the strategy chosen."""
    args = (*MODELS[model], ranks)
    figures: dict[str, Any] = {}
    for name in STRATEGIES:
        cut = shards_for(name, Prefill(*args, T, P, on))
        figures[name] = [predict(name, *args, cut.bounds, P, on).ttft_s, *cut.bounds]
    for rule in ("cost", "alg1", "alg5", "heuristic"):
        figures[rule] = choose(Prefill(*args, T, P, on), heuristic=HEURISTIC, rule=rule).strategy  # type: ignore[arg-type]
    return figures


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, *case in cases()], ids=lambda x: str(x)[:60])
def test_predictions_stay(name: str, case: list[Any]) -> None:
    kept, now = json.loads(KEPT.read_text())[name], found(*case)
    assert kept.keys() == now.keys()
    for key, figures in kept.items():
        assert now[key] == (figures if isinstance(figures, str) else pytest.approx(figures, rel=1e-12)), key


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(found(*case))}" for name, *case in cases()]  # type: ignore[arg-type]
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
