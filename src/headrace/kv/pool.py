"""The pool's book-keeping: which chunk slots are free. The storage behind a slot is kv/storage.py.

With several ranks each has an equal part of the slots, in order:

    | 0 .. per_rank-1 | per_rank .. 2*per_rank-1 | ...        rank_of(slot) = slot // per_rank, its owner
"""

from __future__ import annotations


class SlotPool:
    """Slots 0 .. total-1, each free or taken. Invariant: every slot is exactly once in the free list of its rank, or
    taken; `free` counts the free ones of all ranks. Raises ValueError unless `ranks` parts of equal size can be made.
    """

    def __init__(self, total: int, ranks: int = 1) -> None:
        if total < 1:
            raise ValueError(f"the pool needs at least one chunk, got {total}; raise kv_cache_tokens")
        if ranks < 1:
            raise ValueError(f"the pool needs at least one rank, got {ranks}")
        if total % ranks:
            raise ValueError(f"{total} chunks make no equal parts for {ranks} ranks; give each rank as many chunks")
        self.total = total
        self.ranks = ranks
        self.per_rank = total // ranks
        self.free = total
        self._free = [list(range(end - 1, end - self.per_rank - 1, -1)) for end in self._ends()]
        self._is_free = bytearray(b"\x01" * total)

    def _ends(self) -> range:
        return range(self.per_rank, self.total + 1, self.per_rank)

    def rank_of(self, slot: int) -> int:
        return slot // self.per_rank

    def free_of(self, rank: int) -> int:
        """Free slots of the rank."""
        return len(self._free[rank])

    def take(self, rank: int | None = None) -> int | None:
        """A free slot of the rank, now taken; None when it has none. Without a rank: of the one with the most free
        slots, of several the lowest."""
        if rank is not None:
            free = self._free[rank]
        else:
            free = self._free[0] if self.ranks == 1 else max(self._free, key=len)
        if not free:
            return None
        slot = free.pop()
        self._is_free[slot] = 0
        self.free -= 1
        return slot

    def give(self, slot: int) -> None:
        """Returns a taken slot. Raises ValueError if it is free already."""
        if self._is_free[slot]:
            raise ValueError(f"slot {slot} was given back twice")
        self._is_free[slot] = 1
        self._free[slot // self.per_rank].append(slot)
        self.free += 1

    def check(self, taken: set[int]) -> None:
        """Raises AssertionError unless exactly `taken` is taken."""
        listed = [slot for part in self._free for slot in part]
        free = set(listed)
        assert len(free) == len(listed) == self.free, "a slot stands twice in the free lists, or the count is off"
        assert free.isdisjoint(taken), f"slots both free and taken: {sorted(free & taken)}"
        assert len(free) + len(taken) == self.total, f"leaked: {sorted(set(range(self.total)) - free - taken)}"
        assert all(self._is_free[slot] for slot in free) and sum(self._is_free) == len(free), "marks and list differ"
        for rank, part in enumerate(self._free):
            assert all(self.rank_of(slot) == rank for slot in part), "a slot is in the free list of another rank"
