"""New keys and values go from the ranks that compute them to the owners of their chunks: what strategies share whose
rows meet keys where these lie.

T: rows of a rank in the group; k and v [T, Hkv, D].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.attention import plan as planning
from headrace.kernels.backend import Attend
from headrace.kernels.records import Pool
from headrace.parallel import group_layout
from headrace.parallel.group_context import GroupContext
from headrace.parallel.messages import StepGroup
from headrace.parallel.transport import Transfer

KINDS = 3
KEYS = 2
"""Of KINDS that a message may hold: see ring_q."""


class KeyPlacing(Attend):
    """Attention of one group on one rank, as far as new keys are concerned."""

    def __init__(self, context: GroupContext) -> None:
        self.context = context
        self.size, self.rank = context.transport.size, context.rank
        self.places = {
            (home, owner): places
            for home in range(self.size)
            for owner, places in _places(context.group, home, context.slots_per_rank, context.workspace.device).items()
            if self.rank in (home, owner)
        }

    def expect_keys(self, layer: int, k: Tensor) -> dict[int, tuple[Tensor, Transfer]]:
        """Posts the receives of keys and values that other ranks compute for chunks of this one: [2, n, Hkv, D]."""
        found = {}
        for (home, owner), places in self.places.items():
            if owner == self.rank != home:
                both = k.new_empty(2, len(places.rows), *k.shape[1:])
                tag = self.context.tag(layer, KEYS * self.size + home)
                found[home] = (both, self.context.transport.irecv(both, home, tag))
        return found

    def send_keys(self, layer: int, k: Tensor, v: Tensor) -> list[Transfer]:
        """To the owners of their chunks."""
        works = []
        for (home, owner), places in self.places.items():
            if home == self.rank != owner:
                both = torch.stack((k[places.rows], v[places.rows]))
                tag = self.context.tag(layer, KEYS * self.size + home)
                works.append(self.context.transport.isend(both, owner, tag))
        return works

    def store(self, stored: Pool, k: Tensor, v: Tensor, coming: dict[int, tuple[Tensor, Transfer]]) -> None:
        """What this rank keeps, its own and what is `coming`."""
        own = self.places.get((self.rank, self.rank))
        if own is not None:
            whole = len(own.rows) == len(k)
            mine = (k, v) if whole else (k[own.rows], v[own.rows])
            self.context.kernels.backend.append(stored, *mine, own.slots, own.offsets)
        for home, (both, work) in coming.items():
            work.wait()
            places = self.places[home, self.rank]
            self.context.kernels.backend.append(stored, both[0], both[1], places.slots, places.offsets)


@dataclass(frozen=True, slots=True)
class KeyPlaces:
    """Rows of a home whose keys one rank keeps, and where: its local slots, and offsets in them."""

    rows: Tensor
    slots: Tensor
    offsets: Tensor


def _places(group: StepGroup, home: int, per_rank: int, device: torch.device) -> dict[int, KeyPlaces]:
    """By owner; on the device, where they are used in each layer."""
    runs = group_layout.runs(group, home)
    plan = planning.build([planning.Span(group_layout.slots_of(group, run), run.start, run.rows) for run in runs])
    owners = plan.row_slots // per_rank
    found = {}
    for owner in np.unique(owners).tolist():
        rows = np.flatnonzero(owners == owner)
        slots, offsets = plan.row_slots[rows] % per_rank, plan.row_offsets[rows]
        found[owner] = KeyPlaces(*(torch.from_numpy(x).to(device) for x in (rows, slots, offsets)))
    return found
