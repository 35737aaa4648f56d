"""What came of a restore: which chunks, how long it took, and why it ended early if it did."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.offload.restore.rates import Rates
from headrace.offload.restore.solver import Split
from headrace.offload.ticket import Ticket
from headrace.offload.tiers.base import BlobKind
from headrace.types import CHUNK


class LayerTransfer(NamedTuple):
    """One layer's activations ("x") or keys and values ("k") on their way; layer -1: the headers of all blobs."""

    ticket: Ticket
    kind: BlobKind
    layer: int


class LayerProjection(NamedTuple):
    """One layer's projection; beside_copies: whether the copy stream was at work all the while."""

    tokens: int
    seconds: float
    beside_copies: bool


@dataclass(slots=True, eq=False)
class RestoreReport:
    """kinds: of the chunks that are to come, in order: those to be projected ("x"), then those to be loaded.
    tier: kind of the tier that most of them come from.

    good: chunks up to the first one that was lost; reason: why it was. start_s: time.perf_counter. cpu_s: what the copy
    stream took from the cores. waited_s: how long the engine waited for the copy stream.
    """

    kinds: Sequence[BlobKind]
    tier: str
    good: int = field(init=False)
    cancelled: bool = False
    reason: str = ""
    start_s: float = field(default_factory=time.perf_counter)
    cpu_s: float = 0.0
    waited_s: float = 0.0
    transfers: list[LayerTransfer] = field(default_factory=list)
    projections: list[LayerProjection] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.good = len(self.kinds)

    def lose(self, index: int, why: str) -> None:
        """Chunk `index` did not come as it should, and so none from it on counts."""
        if index < self.good:
            self.good, self.reason = index, why

    @property
    def done(self) -> bool:
        """Whether the copy stream has nothing more to do for it."""
        return all(each.ticket.done for each in self.transfers)

    @property
    def projects(self) -> bool:
        """Whether the engine has a part in it."""
        return self.kinds[0] == "x"

    @property
    def failed(self) -> bool:
        """Whether a chunk was lost so far."""
        return self.lost or self.cancelled

    @property
    def lost(self) -> bool:
        return self.good < len(self.kinds)

    @property
    def tokens(self) -> int:
        """Tokens that are restored."""
        return self.good * CHUNK

    @property
    def projected_tokens(self) -> int:
        return sum(kind == "x" for kind in self.kinds[: self.good]) * CHUNK

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self.start_s

    @property
    def link_s(self) -> float:
        """Time that its transfers took on the copy stream."""
        return sum(each.ticket.busy_s for each in self.transfers)

    @property
    def layer_transfers(self) -> list[tuple[int, float]]:
        """Bytes and seconds of one layer's activations and of its keys and values: the median layer's."""
        found = []
        for kind in dict.fromkeys(each.kind for each in self.transfers):
            tickets = [each.ticket for each in self.transfers if each.kind == kind and each.layer >= 0]
            if tickets:
                found.append((tickets[0].size, statistics.median(ticket.busy_s for ticket in tickets)))
        return found

    def tell(self, rates: Rates) -> None:
        """What a whole restore says of loading and of projecting. While the copy stream is at work, the engine has what
        is left of the cores."""
        if self.failed:
            return
        taken = min(self.cpu_s / self.link_s, 1.0) if self.link_s else 0.0
        for size, seconds in self.layer_transfers:
            rates.observe_load(self.tier, size, 1, seconds, taken * seconds)
        if self.projections:
            free = max(1.0 - taken, 0.05)
            times = [each.seconds * free if each.beside_copies else each.seconds for each in self.projections]
            rates.observe_project(self.projections[0].tokens, statistics.median(times))


@dataclass(slots=True)
class RestoreCounters:
    """Since the engine began. Tokens by how they came back, loaded_from: and by tier; plans: what the solver chose, by
    kind; failures: restores that lost a chunk; link_s: the copy stream was at work for restores, of which the engine
    waited waited_s."""

    restores: int = 0
    loaded_tokens: int = 0
    projected_tokens: int = 0
    recomputed_tokens: int = 0
    restore_s: float = 0.0
    link_s: float = 0.0
    waited_s: float = 0.0
    failures: int = 0
    loaded_from: Counter[str] = field(default_factory=Counter)
    plans: Counter[str] = field(default_factory=Counter)

    def note(self, split: Split) -> None:
        """What was chosen for a run of stored chunks."""
        kinds = {"recompute": split.tokens, "project": split.x, "load": split.load}
        self.plans["+".join(kind for kind, chunks in kinds.items() if chunks)] += 1

    def add(self, report: RestoreReport, recomputed_tokens: int, tiers: Sequence[str]) -> None:
        """A restore that has ended and was confirmed, as far as it came. tiers: where each chunk came from."""
        for kind, tier in zip(report.kinds[: report.good], tiers, strict=False):
            self.loaded_from[tier] += CHUNK * (kind == "k")
        self.projected_tokens += report.projected_tokens
        self.loaded_tokens += report.tokens - report.projected_tokens
        self.recomputed_tokens += recomputed_tokens
        self.restore_s += report.seconds
        self.link_s += report.link_s
        self.waited_s += report.waited_s
