"""What came of a restore: which chunks, how long it took, and why it ended early if it did."""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headrace.offload.ranked import words
from headrace.offload.ranked.words import LayerProjection
from headrace.offload.restore.solver import Split
from headrace.offload.tiers.base import BlobKind
from headrace.planner.profile import Profile
from headrace.types import CHUNK


@dataclass(slots=True, eq=False)
class RestoreReport:
    """kinds: of the chunks that are to come, in order: those to be projected ("x"), then those to be loaded.
    tier: kind of the tier that most of them come from. of[rank]: the places of the chunks that a rank brings.

    good: chunks up to the first one that was lost; reason: why it was. start_s: time.perf_counter. Of the rank that
    took longest: cpu_s: what its copy stream took from the cores; waited_s: how long its steps waited for it.
    """

    kinds: Sequence[BlobKind]
    tier: str
    of: dict[int, list[int]]
    good: int = field(init=False)
    cancelled: bool = False
    reason: str = ""
    start_s: float = field(default_factory=time.perf_counter)
    cpu_s: float = 0.0
    waited_s: float = 0.0
    projections: list[LayerProjection] = field(default_factory=list)
    there: threading.Event = field(default_factory=threading.Event)
    _parts: list[words.ChunksBrought] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.good = len(self.kinds)

    def add(self, rank: int, part: words.ChunksBrought) -> None:
        """What a rank's copy stream has done; on any thread."""
        mine = self.of[rank]
        with self._lock:
            self._parts.append(part)
            if part.good < len(mine):
                where = f"rank {rank}: " if rank or len(self.of) > 1 else ""
                self.lose(mine[part.good], where + part.reason)
            self.cpu_s = max(each.cpu_s for each in self._parts)
            if len(self._parts) == len(self.of):
                self.there.set()

    def add_ended(self, parts: Iterable[words.BringEnded]) -> None:
        """What the steps of all ranks did with it."""
        for part in parts:
            self.waited_s = max(self.waited_s, part.waited_s)
            self.projections += part.projections

    def lose(self, index: int, why: str) -> None:
        """Chunk `index` did not come as it should, and so none from it on counts."""
        if index < self.good:
            self.good, self.reason = index, why

    @property
    def done(self) -> bool:
        """Whether no copy stream has anything more to do for it."""
        return self.there.is_set()

    @property
    def projects(self) -> bool:
        """Whether the steps that wait for it have a part in it."""
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
        """Time that its transfers took on the copy stream: of the rank that took longest."""
        return max((part.link_s for part in self._parts), default=0.0)

    @property
    def layer_transfers(self) -> list[tuple[int, float]]:
        """Bytes and seconds of one layer's activations and of its keys and values, of each rank."""
        return [each for part in self._parts for each in part.layers]

    def tell(self, profile: Profile) -> None:
        """What a whole restore says of loading and of projecting. While the copy stream is at work, the engine has what
        is left of the cores."""
        if self.failed:
            return
        taken = min(self.cpu_s / self.link_s, 1.0) if self.link_s else 0.0
        if profile.by_strategy is not None:
            profile.observe_together(self.tier, self.layer_transfers)
        else:
            for size, seconds in self.layer_transfers:
                profile.observe_load(self.tier, size, 1, seconds, taken * seconds)
        if self.projections:
            free = max(1.0 - taken, 0.05)
            times = [each.seconds * free if each.beside_copies else each.seconds for each in self.projections]
            profile.observe_project(self.projections[0].tokens, statistics.median(times))


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
