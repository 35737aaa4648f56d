"""What rank 0 asks of the tiers of a rank, and what that answers: plain records, sent as msgpack.

Slots are those of the rank's own pool. An answer carries the number of the question. The tensor ranks of a context rank
are asked the same, each of its own share of the heads (joining).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from headrace.offload.tiers.base import BlobKind


class Place(NamedTuple):
    """Where a tensor rank has its heads of a chunk: the tier, and the number of the form (forms.forms_of)."""

    tier: int
    form: int = 0


Reach = tuple[Place, ...]
"""Of each tensor rank."""


class WantedHere(NamedTuple):
    """A chunk to be brought: its number in the sequence, its name, where it goes, where each tensor rank has it, and as
    what it comes: keys and values ("k") or activations ("x"), which one tensor rank has (models.x_turns)."""

    chunk: int
    digest: bytes
    slot: int
    places: Reach
    kind: BlobKind = "k"


class ChunkToStore(NamedTuple):
    """sure: asks every tier whether it has the chunk, not only those in memory. in_memory: gives it to these alone.
    activations: whether its slot has them, too, on the tensor rank whose turn it is. chunk: its number in a sequence,
    by which that goes. quota: the tenant's own, of each tier; None: the common one."""

    slot: int
    digest: bytes
    tenant: bytes
    sure: bool
    in_memory: bool = False
    activations: bool = False
    chunk: int = 0
    quota: float | None = None


class LayerProjection(NamedTuple):
    """One layer's projection; beside_copies: whether the copy stream was at work all the while."""

    tokens: int
    seconds: float
    beside_copies: bool


class OpenTiers(msgspec.Struct, frozen=True, tag=True):
    """identity: what names the model's chunks (offload.identity). Answered by TiersOpen."""

    number: int
    identity: bytes


class FindChunks(msgspec.Struct, frozen=True, tag=True):
    """Which tier has each of these chunks, of which the first is number `first` of a sequence? Answered by
    ChunksFound."""

    number: int
    digests: list[bytes]
    first: int = 0


class Prompt(NamedTuple):
    """What keys and values of a sequence depend on beside its activations. length: in tokens, which length-dependent
    rotary scaling needs. adapter: the number of what its rows from the position adapter_start on have; -1: none."""

    length: int
    adapter: int = -1
    adapter_start: int = 0


class BringChunks(msgspec.Struct, frozen=True, tag=True):
    """Brings chunks into the pool, in this order; steps that come later wait for them. Answered by ChunksBrought. Ended
    by EndBring or CancelBring."""

    number: int
    chunks: list[WantedHere]
    prompt: Prompt


class CancelBring(msgspec.Struct, frozen=True, tag=True):
    """What is left of a BringChunks is skipped. That one is answered all the same."""

    number: int


class EndBring(msgspec.Struct, frozen=True, tag=True):
    """After the step that waited for the chunks of BringChunks number `bring`. Answered by BringEnded, once that step
    has projected what came as activations."""

    number: int
    bring: int


class StoreChunks(msgspec.Struct, frozen=True, tag=True):
    """Gives chunks, in this order, to the tiers that lack them. Answered by ChunksStored once all their slots may be
    written again."""

    number: int
    chunks: list[ChunkToStore]


class TellTiers(msgspec.Struct, frozen=True, tag=True):
    """Answered by TiersTold."""

    number: int


class CloseTiers(msgspec.Struct, frozen=True, tag=True):
    """Writes what waits, for so long at most, and closes the tiers. Answered by TiersTold."""

    number: int
    timeout_s: float


class TiersOpen(msgspec.Struct, frozen=True, tag=True):
    """refused: why the tiers cannot be opened."""

    number: int
    refused: str | None


class ChunksFound(msgspec.Struct, frozen=True, tag=True):
    """places: of keys and values. x: tiers of activations, of the chunks up to the first whose keys and values none
    has; of each the tensor rank's whose turn it is. None for a chunk that no tier has."""

    number: int
    places: list[Reach | None]
    x: list[int | None]


class ChunksBrought(msgspec.Struct, frozen=True, tag=True):
    """good: chunks up to the first that was lost, for the reason told. layers: bytes and seconds of the median layer's
    transfers. See offload.restore.transfer."""

    number: int
    good: int
    reason: str
    link_s: float
    cpu_s: float
    layers: list[tuple[int, float]]


class BringEnded(msgspec.Struct, frozen=True, tag=True):
    """waited_s: how long steps waited for the copy stream."""

    number: int
    waited_s: float
    projections: list[LayerProjection]


class ChunksStored(msgspec.Struct, frozen=True, tag=True):
    number: int


class TiersTold(msgspec.Struct, frozen=True, tag=True):
    """stats: the fields of TierStats by kind. queued: blobs that wait to be written."""

    number: int
    stats: dict[str, dict[str, Any]]
    queued: int


Command = OpenTiers | FindChunks | BringChunks | CancelBring | EndBring | StoreChunks | TellTiers | CloseTiers
Answer = TiersOpen | ChunksFound | ChunksBrought | BringEnded | ChunksStored | TiersTold

_encoder = msgspec.msgpack.Encoder()
_commands: Any = msgspec.msgpack.Decoder(Command)
_answers: Any = msgspec.msgpack.Decoder(Answer)


def encode(word: Command | Answer) -> bytes:
    return _encoder.encode(word)


def command(body: bytes) -> Command:
    """Raises msgspec.ValidationError (a ValueError) for anything that is none."""
    found: Command = _commands.decode(body)
    return found


def answer(body: bytes) -> Answer:
    """As `command`."""
    found: Answer = _answers.decode(body)
    return found
