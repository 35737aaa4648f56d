"""What a step leaves of recurrent states to be settled when it has ended (kv.states)."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.kv.chunk_table import ChunkTable


@dataclass(slots=True)
class StepStates:
    """waiting: slots that are kept for a chunk, of a table, that has no name yet. outdated: slots of states behind
    chunks, of tables, that later ones of the same answers replace."""

    waiting: dict[int, tuple[ChunkTable, int]] = field(default_factory=dict)
    outdated: list[tuple[ChunkTable, int, int]] = field(default_factory=list)
