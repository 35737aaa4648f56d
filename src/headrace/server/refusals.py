"""Refused requests in the log: each at level debug, and in one line an interval what was refused and why."""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from typing import NamedTuple

from headrace.logs import fields, short_id, shown
from headrace.server.errors import ApiError
from headrace.server.tally import Tally

log = logging.getLogger("headrace.server")

REASONS = {
    "overloaded": "queue full",
    "invalid_api_key": "API key",
    "model_not_found": "model",
    "loading": "still loading",
    "restarting": "engine restarting",
    "engine_dead": "engine failed",
    "unknown_parameter": "unknown field",
    "invalid_json": "not JSON",
    "body_too_large": "body too large",
    "context_length_exceeded": "context length",
}
"""code -> a few words. Of other codes the field at fault is told."""

MOST_REASONS = 4
"""Reasons of one status that a line names."""


class Refusal(NamedTuple):
    status: int
    reason: str


class Refusals:
    """note(error) for each answer that is one. Faults of our own (500) are not: each has a traceback in the log."""

    def __init__(self, every_s: float) -> None:
        self._tally = Tally(every_s, self._tell, lambda refusal: refusal._replace(reason="other"))
        self._last: ApiError | None = None

    def note(self, error: ApiError, method: str, path: str, request_id: str) -> None:
        if error.status == 500:
            return
        self._last = error
        self._tally.note(Refusal(error.status, reason_of(error)))
        log.debug(
            "refused  %s  %s %s with %d: %s", short_id(request_id), method, shown(path, 60), error.status,
            shown(error.message),
            extra=fields(request_id=request_id, status=error.status, code=error.code, param=error.param, method=method,
                         path=path[:200]),
        )  # fmt: skip

    def _tell(self, counts: Counter[Refusal], seconds: float) -> None:
        text = refused_line(counts, seconds, self._last.message if self._last else "")
        by_status: Counter[str] = Counter()
        for refusal, count in counts.items():
            by_status[str(refusal.status)] += count
        log.info(text, extra=fields(refused=by_status.total(), refused_by_status=dict(by_status), seconds=seconds))


def reason_of(error: ApiError) -> str:
    """In a few words of ours: a client cannot make up reasons without end."""
    if error.code in REASONS:
        return REASONS[error.code]
    field = re.split(r"[\[.]", error.param or "")[0]
    return shown(field, 40) or error.message.split(":")[0][:40]


def refused_line(counts: Counter[Refusal], seconds: float, message: str) -> str:
    """'refused in the last 5 s: 12 with 429 (queue full), 3 with 400 (max_tokens 2, prompt)'; of a single one all that
    its client was told."""
    if counts.total() == 1:
        (refusal,) = counts
        return f"refused one with {refusal.status}: {shown(message)}"
    found: dict[int, Counter[str]] = defaultdict(Counter)
    for refusal, count in counts.items():
        found[refusal.status][refusal.reason] += count
    by_count = sorted(found.items(), key=lambda item: -item[1].total())
    told = (f"{reasons.total():,} with {status} ({_listed(reasons)})" for status, reasons in by_count)
    return f"refused in the last {seconds:.0f} s: {', '.join(told)}"


def _listed(reasons: Counter[str]) -> str:
    if len(reasons) == 1:
        return next(iter(reasons))
    most = reasons.most_common(MOST_REASONS)
    rest = reasons.total() - sum(count for _, count in most)
    named = [f"{reason} {count:,}" for reason, count in most]
    return ", ".join([*named, f"others {rest:,}"] if rest else named)
