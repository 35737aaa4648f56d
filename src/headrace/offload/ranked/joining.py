"""The answers of a context rank's tensor ranks as one: each tells of its own share of the heads of every chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import zip_longest
from typing import Any, TypeVar, cast

from headrace.offload.ranked import words
from headrace.stats import TierStats

A = TypeVar("A", bound=words.Answer)


def joined(answers: Sequence[A]) -> A:
    """The answers to one question, in the order of the tensor ranks. A chunk is found, or good, if every share is."""
    if len(answers) == 1:
        return answers[0]
    return cast(A, _joined(answers))


def _joined(answers: Sequence[Any]) -> words.Answer:
    first: words.Answer = answers[0]
    match first:
        case words.TiersOpen():
            refused = (_of_rank(rank, each.refused) for rank, each in enumerate(answers) if each.refused is not None)
            return words.TiersOpen(first.number, next(refused, None))
        case words.ChunksFound():
            shares = zip(*(each.places for each in answers), strict=True)
            x = [_first(each) for each in zip_longest(*(each.x for each in answers))]
            return words.ChunksFound(first.number, [_reach(each) for each in shares], x)
        case words.ChunksBrought():
            rank, worst = min(enumerate(answers), key=lambda each: each[1].good)
            return words.ChunksBrought(
                first.number,
                worst.good,
                _of_rank(rank, worst.reason) if worst.reason else "",
                max(each.link_s for each in answers),
                max(each.cpu_s for each in answers),
                [layer for each in answers for layer in each.layers],
            )
        case words.BringEnded():
            return words.BringEnded(first.number, max(each.waited_s for each in answers), first.projections)
        case words.ChunksStored():
            return first
        case words.TiersTold():
            return words.TiersTold(first.number, summed(answers), sum(each.queued for each in answers))


def _of_rank(rank: int, told: str) -> str:
    return f"tensor rank {rank}: {told}"


def _reach(shares: Sequence[words.Reach | None]) -> words.Reach | None:
    found = [share for share in shares if share is not None]
    return tuple(place for share in found for place in share) if len(found) == len(shares) else None


def _first(tiers: Sequence[int | None]) -> int | None:
    """What the only rank says that was asked."""
    return next((tier for tier in tiers if tier is not None), None)


def summed(told: Sequence[words.TiersTold]) -> dict[str, dict[str, Any]]:
    """Figures of tiers by kind, of all ranks that tell them."""
    found: dict[str, dict[str, Any]] = {}
    for each in told:
        for kind, stats in each.stats.items():
            found[kind] = _sum(found[kind], stats, shared=kind != "host") if kind in found else stats
    return found


def _sum(one: dict[str, Any], other: dict[str, Any], shared: bool) -> dict[str, Any]:
    """Numbers are added, but for what a tier holds that all ranks share; one is degraded where it is so on any rank."""
    found = {}
    for item in fields(TierStats):
        a, b = one[item.name], other[item.name]
        holds = shared and item.name in ("used_bytes", "budget_bytes", "blobs")
        found[item.name] = (a or b) if isinstance(a, bool | str) else max(a, b) if holds else a + b
    return found
