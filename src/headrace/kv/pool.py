"""The pool's book-keeping: which chunk slots are free. The storage behind a slot is kv/storage.py."""

from __future__ import annotations


class SlotPool:
    """Slots 0 .. total-1, each free or taken. Invariant: every slot is in the free list exactly once, or taken."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"the pool needs at least one chunk, got {total}; raise kv_cache_tokens")
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._is_free = bytearray(b"\x01" * total)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A free slot, now taken; None when there is none."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._is_free[slot] = 0
        return slot

    def give(self, slot: int) -> None:
        """Returns a taken slot. Raises ValueError if it is free already."""
        if self._is_free[slot]:
            raise ValueError(f"slot {slot} was given back twice")
        self._is_free[slot] = 1
        self._free.append(slot)

    def check(self, taken: set[int]) -> None:
        """Raises AssertionError unless exactly `taken` is taken."""
        free = set(self._free)
        assert len(free) == len(self._free), "a slot stands twice in the free list"
        assert free.isdisjoint(taken), f"slots both free and taken: {sorted(free & taken)}"
        assert len(free) + len(taken) == self.total, f"leaked: {sorted(set(range(self.total)) - free - taken)}"
        assert all(self._is_free[slot] for slot in free) and sum(self._is_free) == len(free), "marks and list differ"
