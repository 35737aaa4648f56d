"""How fast link and arithmetic are, as measured while running, and how many chunks to project at that pace.

KVPR, section 3.3, with the pipeline in its steady state: while an operation computes, what the next one needs is on its
way, so that an operation takes as long as the longer of the two:

    max( (other + n x + (stored - n) kv) / link , rest + n project )        n: chunks projected

The first falls with n where X is smaller than K and V, the second grows: the best n is where they cross.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.recompute.lanes import Ticket

SMOOTH = 0.2
"""Weight of a new figure beside the old one."""


@dataclass(frozen=True, slots=True)
class Work:
    """An operation beside its chunks: rows computed, and bytes over the link in (weights, hidden states)."""

    rows: int
    bytes: int = 0


@dataclass(slots=True)
class Pace:
    """kv_bytes, x_bytes: of a chunk over the link (x_bytes 0: X is resident)."""

    kv_bytes: int
    x_bytes: int
    link_s: float = 0.0
    project_s: float = 0.0
    rest_s: dict[int, float] = field(default_factory=dict)
    """Seconds a byte; seconds a chunk; seconds of an operation beside projecting, by its rows."""

    def carried(self, ticket: Ticket) -> None:
        """A transfer that ended. Short ones say little about the rate."""
        if ticket.size >= 1 << 16:
            self.link_s = _smooth(self.link_s, (ticket.ended_s - ticket.began_s) / ticket.size)

    def projected(self, chunks: int, seconds: float) -> None:
        if chunks:
            self.project_s = _smooth(self.project_s, seconds / chunks)

    def computed(self, work: Work, seconds: float) -> None:
        self.rest_s[work.rows] = _smooth(self.rest_s.get(work.rows, 0.0), max(0.0, seconds))

    def seconds(self, loaded: int, projected: int, work: Work) -> float:
        """Predicted time of an operation."""
        moved = work.bytes + loaded * self.kv_bytes + projected * self.x_bytes
        return max(moved * self.link_s, self.rest_s.get(work.rows, 0.0) + projected * self.project_s)

    def split(self, stored: int, whole: int, work: Work) -> int:
        """Chunks to project, of `stored` ones of which `whole` may be."""
        gain = (self.kv_bytes - self.x_bytes) * self.link_s
        if gain <= 0:
            return 0
        behind = (work.bytes + stored * self.kv_bytes) * self.link_s - self.rest_s.get(work.rows, 0.0)
        return max(0, min(whole, round(behind / (gain + self.project_s))))


def _smooth(old: float, new: float) -> float:
    return new if old == 0.0 else (1 - SMOOTH) * old + SMOOTH * new
