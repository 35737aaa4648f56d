"""Which strategy computes a prefill, with which bounds, and why: predicted cost decides, or a named rule.

The engine asks this for every request; nothing else decides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, get_args

import msgspec

from headrace.config.ranks import StrategyRule
from headrace.planner.heuristic import Heuristic, RingRates, algorithm1, algorithm5, guarded
from headrace.planner.machine import Machine, ModelShape, count_of
from headrace.planner.partition import Bounds
from headrace.planner.schedule import Shards
from headrace.planner.shards import Prefill
from headrace.planner.timeline import NO_LOADS, Cost, CostModel, Loads
from headrace.strategies import FALLBACK, OFFERED, STRATEGIES, known, load

SHARDS: dict[str, Callable[[Prefill], Shards]] = {name: load(each.shards) for name, each in STRATEGIES.items()}
COST: dict[str, CostModel] = {name: load(each.cost) for name, each in STRATEGIES.items()}

SHALLOW, LAST = 4, 2
"""Layers of the models from which `estimates` draws: of all, and of the end of the last one."""

MARGIN = 0.03
"""Several ranks must be predicted to gain this much on one: a tie goes to the strategy that leaves ranks free."""


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """bounds are absolute positions from P to P + T; shard i, bounds[i] .. bounds[i+1]-1, is computed by ranks[i].

    predicted_s: seconds to the first token by strategy, as far as considered. reason: one line for people.
    """

    strategy: str
    bounds: Bounds
    ranks: tuple[int, ...]
    predicted_s: Mapping[str, float]
    reason: str


class Pace(NamedTuple):
    """What follows in a prefill when a rank has what it loads: from when it has the first layer's, or the last layer's,
    until the end. own_s: of a layer's time, what the rank computes itself."""

    first_s: float
    last_s: float
    own_s: float

    def scaled(self, by: float) -> Pace:
        return Pace(*(seconds * by for seconds in self))


class Estimate(NamedTuple):
    """Seconds of a prefill whose cached tokens are there, and the pace of each rank that loads."""

    seconds: float
    paces: Mapping[int, Pace]


def shards_for(strategy: str, prefill: Prefill) -> Shards:
    """How a strategy would cut the new tokens: see planner.shards. Raises ValueError for an unknown strategy."""
    return SHARDS[known(strategy).name](prefill)


def predict(
    strategy: str,
    machine: Machine,
    shape: ModelShape,
    ranks: int,
    bounds: Sequence[int],
    P: int = 0,
    cached_on: Sequence[float] | None = None,
    loads: Mapping[int, Loads] = NO_LOADS,
) -> Cost:
    """The cost model's figures for a strategy with these bounds (as `shards_for` gives them): see planner.cost.

    What its exchanges were measured to take beyond them is added (Machine.exchange_s).
    """
    cost = COST[known(strategy).name](machine, shape, ranks, bounds, P, cached_on, loads=loads)
    beyond = dict(machine.exchange_s).get(strategy, 0.0) * shape.layers
    return replace(cost, ttft_s=cost.ttft_s + beyond) if beyond else cost


def choose(
    prefill: Prefill,
    heuristic: Heuristic | None = None,
    *,
    rule: StrategyRule = "cost",
    allowed: Collection[str] = OFFERED,
) -> StrategyChoice:
    """How to compute new tokens on cached ones.

    heuristic: instead of the tuned table's. rule: "cost" takes the least predicted time of all allowed strategies, the
    others decide between ring-kv and ring-q only. Pass-Q is not used where nothing is cached (pass-KV instead). Where
    one rank is predicted to be as fast, it is `single` under every rule. Raises ValueError for T < 1, an unknown rule
    or strategy, nothing left that is allowed, or rule "heuristic" without coefficients.
    """
    _check(prefill, rule, allowed)
    machine, shape, ranks, T, P = prefill.machine, prefill.shape, prefill.ranks, prefill.T, prefill.P
    cuts = {name: shards_for(name, prefill) for name in _considered(ranks, P, allowed)}
    predicted = {
        name: prefill.corrected(name, predict(name, machine, shape, ranks, cut.bounds, P, prefill.cached_on).ttft_s)
        for name, cut in cuts.items()
    }
    if rule == "cost":
        name, why = _cheapest(predicted), ""
    else:
        coefficients = heuristic or (prefill.table.heuristic if prefill.table else None)
        name, why = _ruled(rule, RingRates.of(machine, shape, ranks), coefficients, predicted, T, P)
    cut, one = cuts[name], one_engine_s(machine, shape, T, P)
    return StrategyChoice(name, cut.bounds, cut.ranks, predicted, _reason(name, why, predicted, machine, one))


def estimates(prefill: Prefill, allowed: Collection[str] = OFFERED, loads: Collection[int] = ()) -> dict[str, Estimate]:
    """What each strategy that `choose` would consider takes, without a search: for who asks often. A chain is cut by
    the closed form, and the time of a deep model follows from a shallow one. loads: ranks that load cached tokens."""
    quick = replace(prefill, search=False)
    return {name: _estimated(name, quick, loads) for name in _considered(prefill.ranks, prefill.P, allowed)}


def _estimated(strategy: str, prefill: Prefill, loads: Collection[int]) -> Estimate:
    bounds, layers = shards_for(strategy, prefill).bounds, prefill.shape.layers

    def walk(most: int, loads: Mapping[int, Loads] = NO_LOADS) -> Cost:
        shape = msgspec.structs.replace(prefill.shape, layers=min(layers, most))
        return predict(strategy, prefill.machine, shape, prefill.ranks, bounds, prefill.P, prefill.cached_on, loads)

    cost, last = walk(SHALLOW), min(layers, LAST) - 1
    seconds, late = cost.ttft_s + max(0, layers - SHALLOW) * cost.period_s, 2 * cost.ttft_s
    paces = dict[int, Pace]()
    for rank in loads:
        arrives = Loads((0.0,) * (last + 1), (0.0,) * last + (late,))
        last_s = walk(LAST, {rank: arrives}).ttft_s - late
        first_s = min(seconds, (layers - 1) * cost.period_s + last_s)
        pace = Pace(first_s, last_s, cost.own_s[rank] if cost.own_s else seconds)
        paces[rank] = pace.scaled(prefill.corrected(strategy, 1.0))
    return Estimate(prefill.corrected(strategy, seconds), paces)


def _considered(ranks: int, P: int, allowed: Collection[str]) -> list[str]:
    """One rank is always single; pass-Q with nothing cached is pass-KV."""
    considered = [name for name in STRATEGIES if name in allowed and (ranks > 1 or name == "single")]
    considered = [name for name in considered if P or not STRATEGIES[name].needs_cached]
    return considered or (["single"] if ranks == 1 else [FALLBACK])


def one_engine_s(machine: Machine, shape: ModelShape, T: int, P: int = 0) -> float | None:
    """Predicted seconds of one engine that has all cores of the ranks' host and all cached tokens, in place of these
    ranks. None where the ranks share no host, or a rank may not use its other cores."""
    return None if machine.one_engine is None else predict("single", machine, shape, 1, (P, P + T), P).ttft_s


def _check(prefill: Prefill, rule: str, allowed: Collection[str]) -> None:
    ranks, T, P, table = prefill.ranks, prefill.T, prefill.P, prefill.table
    if ranks < 1 or T < 1 or P < 0:
        raise ValueError(f"nothing to choose for {T} new tokens on {P} cached ones and {ranks} ranks")
    if rule not in get_args(StrategyRule):
        raise ValueError(f"unknown rule {rule!r}: one of {', '.join(get_args(StrategyRule))}")
    unknown = sorted(set(allowed) - set(STRATEGIES))
    if unknown or not allowed:
        raise ValueError(f"allowed must name some of {', '.join(STRATEGIES)}, got {sorted(allowed)}")
    if table is not None and table.stamp.ranks != ranks:
        raise ValueError(f"the tuned table is for {table.stamp.ranks} ranks, not {ranks}: run `headrace tune` here")


def _cheapest(predicted: Mapping[str, float]) -> str:
    """The least predicted time; one rank wins what several would not gain MARGIN on."""
    best = min(predicted, key=predicted.__getitem__)
    return "single" if predicted.get("single", float("inf")) * (1 - MARGIN) <= predicted[best] else best


def _ruled(
    rule: str, ring: RingRates, heuristic: Heuristic | None, predicted: Mapping[str, float], T: int, P: int
) -> tuple[str, str]:
    """Strategy and reason by a rule between the two rings; where only one of them may be used it is that one."""
    rings = [name for name in ("ring-kv", "ring-q") if name in predicted]
    if not rings:
        return _cheapest(predicted), f"{rule} decides between rings, none of which may be used; by cost"
    if len(rings) == 1:
        name = rings[0]
    elif rule == "alg1":
        name = algorithm1(ring, T, P)
    elif rule == "alg5":
        name = algorithm5(ring, T, P)
    elif heuristic is None:
        raise ValueError("rule 'heuristic' needs fitted coefficients: run `headrace tune --heuristic`")
    else:
        name = guarded(ring, heuristic, T, P)
    if _cheapest({key: seconds for key, seconds in predicted.items() if key in ("single", name)}) == "single":
        return "single", f"too small for {name}, which {rule} names"
    return name, f"by {rule}"


def _reason(chosen: str, why: str, predicted: Mapping[str, float], machine: Machine, one: float | None) -> str:
    """'chain: 0.41 s predicted, ring-kv 0.44, gather 0.52, single (one engine with all 2 cores) 0.80'.

    Where `single` is not considered the one engine stands beside the others.
    """
    with_cores = (
        None if machine.one_engine is None else f"one engine with all {count_of(machine.one_engine.cores, 'core')}"
    )
    notes = {"single": [with_cores or f"one rank, {count_of(machine.cores, 'core')}"]}
    said = {name: _noted(name, notes.get(name, [])) for name in predicted}
    others = {said[name]: seconds for name, seconds in predicted.items() if name != chosen}
    if with_cores and one is not None and "single" not in predicted:
        others[with_cores] = one
    head = _noted(chosen, [*notes.get(chosen, []), *([why] if why else [])])
    parts = [f"{head}: {seconds_text(predicted[chosen])} s predicted"]
    return ", ".join(
        [*parts, *(f"{name} {seconds_text(others[name])}" for name in sorted(others, key=others.__getitem__))]
    )


def _noted(name: str, notes: Sequence[str]) -> str:
    return f"{name} ({'; '.join(notes)})" if notes else name


def seconds_text(seconds: float) -> str:
    """Two digits after the point, or two significant ones below a tenth."""
    return f"{seconds:.2f}" if seconds >= 0.1 else f"{seconds:.2g}"
