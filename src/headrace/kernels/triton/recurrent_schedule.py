"""Segments of recurrent layers as the GPU's kernels take them. No torch.

Segments that share a slot which one of them writes make a group: a program takes them in their order, and groups are
independent. The inputs of the convolution are found for all rows at once, before any state is written. T: rows, K:
inputs of the convolution, C: its channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
NOTHING, KEPT = -1, -2
"""Taps: no input; and KEPT - n: input n of last [slots (K - 1), C], as the step finds it."""


class Arranged(NamedTuple):
    """A step's segments as the kernels take them. taps [T, K - 1]: where the inputs before each row's own lie, a row of
    the step, NOTHING or KEPT - n. segments [n, 4], sorted by group; groups [m + 1]: where each begins, and the end of
    the last."""

    taps: Int32
    segments: Int32
    groups: Int32

    @classmethod
    def of(cls, segments: Sequence[Sequence[int]], rows: int, kernel: int) -> Arranged:
        """segments: as kernels.gated_delta takes them, each row in one."""
        groups = groups_of(segments)
        order = [number for group in groups for number in group]
        by_group = np.array([segments[number] for number in order], np.int32).reshape(-1, 4)
        begins = np.cumsum([0, *map(len, groups)], dtype=np.int32)
        return cls(taps_of(segments, rows, kernel - 1), by_group, begins)


def groups_of(segments: Sequence[Sequence[int]]) -> list[list[int]]:
    """Numbers of the segments that share a slot which one of them writes, in their order."""
    written = {target for *_, target in segments}
    of_slot: dict[int, list[int]] = {}
    for number, (_, _, source, target) in enumerate(segments):
        group = of_slot.setdefault(target, [])
        if source >= 0 and source != target and source in written:
            other = of_slot.setdefault(source, group)
            if other is not group:
                group += other
                of_slot |= {slot: group for slot, each in of_slot.items() if each is other}
        group.append(number)
    return [sorted(group) for group in {id(group): group for group in of_slot.values()}.values()]


def taps_of(segments: Sequence[Sequence[int]], rows: int, kept: int) -> Int32:
    """kept: K - 1. See Arranged. A segment that begins with what another leaves has that one's inputs before it."""
    taps: Int32 = (np.arange(rows)[:, None] + np.arange(-kept, 0)).astype(np.int32)
    left: dict[int, list[int]] = {}
    before: list[list[int]] = []
    for begin, end, source, target in segments:
        found = left.get(source)
        if found is None:
            first = KEPT - source * kept
            found = list(range(first, first - kept, -1)) if source >= 0 else [NOTHING] * kept
        before.append(found)
        left[target] = (found + list(range(max(begin, end - kept), end)))[-kept:]
    begins, ends = np.array([each[:2] for each in segments], np.int64).reshape(-1, 2).T
    found_of = np.array(before, np.int32).reshape(-1, kept)
    for row in range(kept):
        has = ends - begins > row
        taps[begins[has] + row, : kept - row] = found_of[has, row:]
    return taps
