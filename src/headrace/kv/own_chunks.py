"""Which chunks of a rank's store a group of sequences meets: plain data for whoever stages them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int32]
NONE: Slots = np.empty(0, dtype=np.int32)


class OwnChunks(NamedTuple):
    """slots: in the rank's store, ascending, none twice; staged chunk i is the one of slots[i].

    cached[window]: places in `slots` of the chunks whose earlier keys are seen through that window (None: no window).
    written: places of those in which the group writes.

    Of those that stage activations: rows: how many this rank computes. numbers, prompts: of each slot, how many chunks
    of its sequence are before it, and the length of a prompt that it is of. begun, foreign: places of the written ones
    whose first row the group computes, and of which other ranks compute rows. adapters [n, 2]: of each slot, the number
    of what that prompt has (-1: none), and the position from which on.
    """

    slots: Slots
    cached: Mapping[int | None, Slots]
    written: Slots
    rows: int = 0
    numbers: Slots = NONE
    prompts: Slots = NONE
    begun: Slots = NONE
    foreign: Slots = NONE
    adapters: Slots = NONE
