"""Which chunks of a rank's store a group of sequences meets: plain data for whoever stages them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int32]


class OwnChunks(NamedTuple):
    """slots: in the rank's store, ascending, none twice; staged chunk i is the one of slots[i].

    cached[window]: places in `slots` of the chunks whose earlier keys are seen through that window (None: no window).
    written: places of those in which the group writes.
    """

    slots: Slots
    cached: Mapping[int | None, Slots]
    written: Slots
