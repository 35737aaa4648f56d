"""A draft model whose keys and values lie behind the slots of the pool, beside the model's own.

It has a storage of its own with as many slots, and goes by the very chunks of each sequence's table: so prefixes are
shared, chunks preempted and evicted, for both models at once. `Node.drafted` says whether the draft model has the whole
chunk; of the last chunks of a sequence it knows how far it has come:

    table    | shared | shared | own, full | own tail .. newest | rows of the draft ..
    has K, V | drafted| drafted| as far as DraftedSequence.length |

What follows a wrong draft is written anew: rows behind the last token that stands count for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from headrace.device import current
from headrace.engine.executor import Computed
from headrace.engine.programs import Launched
from headrace.engine.runner import Runner
from headrace.engine.sequence import SequenceState, Slice
from headrace.kv.chunk_table import ChunkTable
from headrace.kv.tree import Node
from headrace.parallel.threads import RankThreads
from headrace.types import CHUNK, chunks_for

AT_ONCE = 8
"""Tokens that the draft model may lack of a sequence for which it drafts: more are computed beforehand."""
CATCH_UP = 256
"""Tokens at most that the draft model computes beside a step of the model, to get in step with sequences."""
UNKNOWN = 0
"""Stands in a draft until the draft model has said which token it is."""


class DraftedSequence:
    """What the draft model has of one sequence. `own` is the sequence as its runner sees it: tokens known and drafted,
    and a table over the same chunks, as long as it has come."""

    def __init__(self, sequence: SequenceState) -> None:
        self.sequence = sequence
        self.own = SequenceState(sequence.request, sequence.index, sequence.order)
        self.own.reports_from = None
        self.table = self.own.table = ChunkTable(self.own.tokens, b"", b"", -1, False, 1)
        self._known = len(self.own.tokens)
        self._whole = 0
        """Chunks up to which Node.drafted is set."""

    @property
    def length(self) -> int:
        """Tokens whose keys and values the draft model has."""
        return self.table.length

    @property
    def lacking(self) -> int:
        """Tokens that it lacks of those whose chunks the sequence has now: while it decodes all but the newest, and
        those that the model itself is to compute again."""
        return max(0, self.sequence.computed - self.length)

    def follow(self) -> None:
        """Takes in the tokens and chunks that the sequence has now: what was computed of drafted tokens stays as far as
        they were drawn."""
        fed, tokens, stands = self.own.tokens, self.sequence.tokens, self._known
        while stands < min(len(fed), len(tokens)) and fed[stands] == tokens[stands]:
            stands += 1
        fed[stands:] = tokens[stands:]
        self._known = len(tokens)
        self.table.length = min(self.length, stands)
        self._take_chunks(len(tokens))
        self._mark()

    def _take_chunks(self, end: int) -> None:
        """Has the table's chunks be those of the sequence, as far as `end` tokens go: a step takes no others."""
        assert self.sequence.table is not None, "a running sequence has a table"
        nodes, table = self.sequence.table.nodes[: chunks_for(end)], self.table
        if nodes == table.nodes:
            return
        pairs = enumerate(zip(table.nodes, nodes, strict=False))
        same = next((chunk for chunk, (one, other) in pairs if one is not other), min(len(table.nodes), len(nodes)))
        table.cut(same)
        for node in nodes[same:]:
            table.append(node)

    def _mark(self) -> None:
        """Notes the chunks that are whole now, and goes past those that another sequence has had computed."""
        nodes = self.table.nodes
        for node in nodes[min(self._whole, self.length // CHUNK) : self.length // CHUNK]:
            node.drafted = True
        while self.length // CHUNK < len(nodes) and nodes[self.length // CHUNK].drafted:
            self.table.length = (self.length // CHUNK + 1) * CHUNK
        self._whole = self.length // CHUNK

    def earlier(self, most: int) -> Slice:
        """The next tokens that it lacks, at most so many."""
        end = self.length + min(most, self.lacking)
        self._take_chunks(end)
        return Slice(self.own, self.length, end - self.length)

    def newest(self) -> Slice:
        """The tokens from the first that it lacks to the newest one. Those behind the first stand as a draft, whose
        logits are wanted all: such steps are one call of C++."""
        own, start = self.own, min(self.length, len(self.own.tokens) - 1)
        own.draft = own.tokens[start + 1 :]
        del own.tokens[start + 1 :]
        return Slice(own, start, 1 + len(own.draft))

    def following(self) -> Slice:
        """The token that was drafted last."""
        own = self.own
        self._take_chunks(len(own.tokens))
        return Slice(own, len(own.tokens) - 1, 1)

    def computed(self, part: Slice) -> None:
        """A slice has been computed."""
        self.own.tokens += self.own.draft
        self.own.draft = []
        self.table.length = part.end

    @property
    def found(self) -> list[int]:
        """Tokens drafted behind those that were known when it last followed."""
        return self.own.tokens[self._known :]

    def nodes(self, part: Slice) -> list[Node]:
        """The chunks that a slice writes into."""
        return self.table.nodes[part.start // CHUNK : chunks_for(part.end)]


class DraftModel:
    """runner: of the draft model, on a storage with the slots of the pool. longest: tokens that it takes. cost: of a
    pass, as a part of a step of the model, as long as nothing is measured. again: the model has recurrent layers, so
    it computes rows again that were right before a wrong one (see `places`). at_once: tokens that `catch_up` computes
    at most. threads: of rank 0 of several, where it runs with all cores of the host: the others wait for their step.
    seconds: of a pass over one row and of a token of a prompt, where a step of the model says nothing of them."""

    def __init__(
        self,
        runner: Runner,
        longest: int,
        cost: float,
        again: bool = False,
        at_once: int = CATCH_UP,
        threads: RankThreads | None = None,
        seconds: tuple[float, float] | None = None,
    ) -> None:
        self.runner, self.longest, self.cost, self.again, self.at_once = runner, longest, cost, again, at_once
        self.threads, self.seconds = threads, seconds

    def _run(self, slices: Sequence[Slice]) -> Computed:
        if self.threads is not None:
            self.threads.use(whole=True)
        return self.runner.run(slices)

    def catch_up(self, sequences: Iterable[DraftedSequence]) -> int:
        """Computes tokens of those that it lacks, of one sequence after another. Of several sequences that lack the
        same chunk one computes it, and the others go past it later. The number of tokens."""
        slices: dict[DraftedSequence, Slice] = {}
        written: set[Node] = set()
        most = self.at_once
        for each in sequences:
            part = each.earlier(most)
            if part.length and written.isdisjoint(each.nodes(part)):
                written.update(each.nodes(part))
                slices[each] = part
                most -= part.length
        if slices:
            self._run(list(slices.values()))
            if self.runner.launches:
                # Else whoever measures it would take what comes next for slow.
                current().current_stream().synchronize()
        for each, part in slices.items():
            each.computed(part)
            each.follow()
        return sum(part.length for part in slices.values())

    def draft(self, sequences: Iterable[DraftedSequence], note: Callable[[int, float], None]) -> None:
        """Fills the drafts of sequences, which have as many tokens as are wanted, by the most probable ones: a pass for
        each place of a draft, over all sequences whose draft goes as far. note(rows, seconds) is told of each pass.

        A GPU looks up in a pass what the one before has chosen there: it has the next one before it has ended one."""
        drafting, place = list(sequences), 0
        slices = {each: each.newest() for each in drafting}
        under_way: Launched | None = None
        watch = _Stopwatch(note)
        while slices:
            parts = list(slices.values())
            launched = self.runner.launch(parts, None if under_way is None else _last_rows(under_way))
            if under_way is not None:
                _land(under_way, watch)
            found: dict[SequenceState, int] = {}
            if launched is None:
                found = last_tokens(self._run(parts))
                watch.lap(sum(part.length for part in parts))
            for each, part in slices.items():
                each.computed(part)
                each.own.tokens.append(found.get(each.own, UNKNOWN))
            under_way, place = launched, place + 1
            slices = {each: each.following() for each in slices if place < len(each.sequence.draft)}
        if under_way is not None:
            _land(under_way, watch)
        for each in drafting:
            each.sequence.draft[:] = each.found


class _Stopwatch:
    """note(rows, seconds) is told of each lap."""

    def __init__(self, note: Callable[[int, float], None]) -> None:
        self.note, self._began = note, time.perf_counter()

    def lap(self, rows: int) -> None:
        began, self._began = self._began, time.perf_counter()
        self.note(rows, self._began - began)


def _last_rows(launched: Launched) -> dict[SequenceState, int]:
    """The row of each sequence that chooses the token behind what it computes."""
    ends = accumulate(part.length for part in launched.slices)
    return {part.sequence: end - 1 for part, end in zip(launched.slices, ends, strict=True)}


def _land(launched: Launched, watch: _Stopwatch) -> None:
    """Waits for a pass, and puts what it has chosen where nothing was known."""
    tokens, rows = launched.greatest().tokens, _last_rows(launched)
    for part in launched.slices:
        part.sequence.tokens[part.end] = tokens[rows[part.sequence]]
    watch.lap(launched.rows)


def last_tokens(computed: Computed) -> dict[SequenceState, int]:
    """The most probable token behind each sequence's last row."""
    rows = [(part.sequence, row + part.drafted) for part, row in computed.parts]
    every = computed.logits.argmax(-1).tolist() if computed.greatest is None else computed.greatest.tokens
    return {sequence: every[row] for sequence, row in rows}
