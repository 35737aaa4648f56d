"""GroupContext: what a strategy gets from the rank that runs it for one group of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from headrace.arrival import Arrival
from headrace.kv.storage import LayerPools
from headrace.parallel.coming import Coming, SideStream
from headrace.parallel.merging import Kernels
from headrace.parallel.messages import StepGroup
from headrace.parallel.transport import Tag, Transfer, Transport
from headrace.parallel.workspace import Workspace


@dataclass(slots=True)
class TokenCounters:
    """Over a rank's life: token entries sent to each rank (K and V of one token in one layer count as one)."""

    tokens: dict[int, int] = field(default_factory=dict)

    def sent(self, to: int, tokens: int) -> None:
        self.tokens[to] = self.tokens.get(to, 0) + tokens


@dataclass(slots=True)
class GroupContext:
    """A rank, at one group. number counts the groups of all steps alike on every rank. cuts: whether of the last layer
    with attention the wanted rows alone are computed, since it is the model's last. side: of a rank on a device."""

    group: StepGroup
    number: int
    transport: Transport
    storage: LayerPools
    kernels: Kernels
    workspace: Workspace
    slots_per_rank: int
    counters: TokenCounters
    coming: Coming
    cuts: bool = True
    side: SideStream | None = None

    def wait_for_own(self, layer: int) -> None:
        """Until this layer of the group's chunks that this rank owns can be read from its pool."""
        if self.coming:
            for part in self.pending(self.own_slots(), layer):
                part.wait()

    def pending(self, slots: list[int], layer: int) -> Sequence[Arrival]:
        """What must come before this layer can read its keys and values in these slots of the rank's pool."""
        return self.coming.pending(slots, self.kernels.spec.source(layer))

    def own_slots(self) -> list[int]:
        """Slots of this rank's pool that the group's sequences have."""
        here = range(self.rank * self.slots_per_rank, (self.rank + 1) * self.slots_per_rank)
        return [slot - here.start for part in self.group.parts for slot in part.slots if slot in here]

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def layers(self) -> int:
        return self.kernels.spec.layers

    def tag(self, layer: int, piece: int) -> Tag:
        return Tag(self.number, layer, piece)

    def send(self, tensors: list[Tensor], to: int, layer: int, piece: int, tokens: int) -> list[Transfer]:
        """Sends each tensor of a piece (K, V, scales) under its own tag."""
        self.counters.sent(to, tokens)
        return [self.transport.isend(x, to, self.tag(layer, 4 * piece + i)) for i, x in enumerate(tensors)]

    def receive(
        self, tensors: list[Tensor], source: int, layer: int, piece: int, relay: int | None = None, tokens: int = 0
    ) -> list[Transfer]:
        """Receives them; with `relay`, they are sent on to that rank, which counts as `tokens` sent."""
        if relay is not None:
            self.counters.sent(relay, tokens)
        return [self.transport.irecv(x, source, self.tag(layer, 4 * piece + i), relay) for i, x in enumerate(tensors)]
