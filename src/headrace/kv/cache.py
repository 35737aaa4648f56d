"""The KV cache as the scheduler sees it: a table of chunks per sequence, filled from the tree or newly.

A sequence of `length` cached tokens holds the chunks 0 .. ceil(length/64)-1:

    |<------------- length ------------->|
    | shared | shared | own, pending | own tail |
    0        64       128            192        ^ length

Protocol of a step: `reuse` what the tree has, `extend` by the tokens to be computed, run the step, `commit`.

With several ranks each chunk has an owner, the rank of its slot. The chunks of a block have one owner, so that one rank
merges the block in the canonical order (docs/attention.md). Where that cannot be, `KVCache.displaced` counts it, and
pass-Q goes from owner to owner (parallel.split_blocks).
"""

from __future__ import annotations

import hashlib
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from headrace.kv.accounts import Account, mark_of
from headrace.kv.checks import check_tables
from headrace.kv.chunk_table import ChunkTable, Owners
from headrace.kv.milestones import INTERVAL
from headrace.kv.names import ChunkNames
from headrace.kv.placement import Placement
from headrace.kv.pool import SlotPool
from headrace.kv.states import StateCache
from headrace.kv.tree import Node, PrefixTree, tenant_mark
from headrace.stats import KVStats
from headrace.types import BLOCK_CHUNKS, CHUNK, chunks_for


class KVCache:
    """Pool, tree and tables. `identity` names model, layout and dtype: chunks of another identity never match.

    total_chunks: of all ranks together, in equal parts; ValueError if that cannot be. states: how many recurrent states
    there are, with one rank, for a model that has them; state_interval: tokens between those within prompts.
    tables are those of sequences; parked ones have none any more, and are held until what they hold is stored below;
    pinned ones never had one (kv.pins).
    loose: chunks that something is written into before a table has them.

    displaced: new chunks that lie elsewhere than asked, since every slot of the rank asked for was held. While it is
    zero (and `by_block` is not switched off) each block of a table has one owner.
    """

    block_chunks = BLOCK_CHUNKS

    def __init__(
        self, total_chunks: int, identity: bytes = b"", ranks: int = 1, states: int | None = None,
        state_interval: int = INTERVAL,
    ) -> None:  # fmt: skip
        self.pool = SlotPool(total_chunks, ranks)
        self.tree = PrefixTree(self.pool)
        self.states = None if states is None else StateCache(states, self.tree, state_interval)
        self.identity = identity
        self.ranks = ranks
        self.displaced = 0
        self.tables: set[ChunkTable] = set()
        self.parked: set[ChunkTable] = set()
        self.pinned: set[ChunkTable] = set()
        self.loose: set[Node] = set()
        self._placement = Placement(self.tree)
        self._latest: ChunkTable | None = None
        """The table opened last, if it is open: requests that begin alike often come one after another."""
        self._names = ChunkNames(self.tree)

    @property
    def available(self) -> int:
        """Chunks that can be had without preempting anybody."""
        return self.tree.available

    def available_on(self, rank: int, account: Account | None = None) -> int:
        """Chunks of the rank that the account, or anybody, can have without preempting anybody."""
        return self.tree.available_on(rank, account)

    def available_for(self, account: Account | None) -> int:
        """Chunks that the account, or whoever has none, can have without preempting anybody."""
        return self.tree.available_for(account)

    def open(
        self,
        tokens: list[int],
        *,
        salt: str | None = None,
        public_tokens: int = 0,
        namespace: str = "",
        shares: bool = True,
        reusable: int | None = None,
        account: Account | None = None,
        tenant: str = "",
        mark: tuple[bytes, int] | None = None,
    ) -> ChunkTable:
        """An empty table for `tokens`.

        salt: tenants with different salts share no chunk beyond the whole chunks of the first `public_tokens` tokens.
        namespace: further identity of the keys (length-dependent rotary scaling). shares=False keeps it all private.
        reusable: tokens that may be taken from the tree (None: all); what is computed is shared all the same.
        account: whose the chunks are that are not public. tenant: for whom tiers count these; "": each salt by itself.
        mark: what else the keys depend on, 16 bytes, and the chunk from which on they do.
        """
        root = hashlib.blake2b(namespace.encode(), digest_size=32, key=hashlib.sha256(self.identity).digest()).digest()
        salt_chunk = public_tokens // CHUNK if salt is not None else -1
        table = ChunkTable(tokens, root, tenant_mark(salt), salt_chunk, shares, self.pool.per_rank, mark)
        table.reusable, table.account, table.pays = reusable, account, mark_of(tenant) if tenant else b""
        if self._latest is not None:
            table.borrow(self._latest)
        self._latest = table
        self.tables.add(table)
        self.tree.now = time.monotonic()
        return table

    def reuse(self, table: ChunkTable) -> tuple[int, bool]:
        """Attaches chunks that the tree has: (tokens gained, whether the next chunk is being written elsewhere).

        See ChunkTable.reusable_chunks for what may be attached.
        """
        before = table.length
        if before % CHUNK or not table.shares:
            return 0, False
        if self.states is not None:
            return self._reuse_with_state(table, self.states)
        for chunk in range(before // CHUNK, table.reusable_chunks):
            node = self.tree.find(table.digest(chunk))
            if node is None or node.parent is not table.node_before():
                break
            if not node.complete:
                return table.length - before, True
            self.tree.hold(node)
            table.append(node)
            table.length += CHUNK
        return table.length - before, False

    def _reuse_with_state(self, table: ChunkTable, states: StateCache) -> tuple[int, bool]:
        """`reuse` as far as there is a recurrent state to go on from."""
        nodes, blocked = states.reachable(table)
        for node in nodes:
            self.tree.hold(node)
            table.append(node)
        if nodes:
            table.length += len(nodes) * CHUNK
            states.attach(table, nodes[-1])
        return len(nodes) * CHUNK, blocked

    def cost(self, table: ChunkTable) -> int:
        """Chunks of `available_for` that the table's known tokens would still take: those of the tree that others hold
        cost nothing. An upper bound: chunks not yet in the tree are counted for each sequence that needs them."""
        first, total = len(table.nodes), chunks_for(len(table.tokens)) - table.coming
        if not table.shares:
            return total - first
        reusable = table.reusable_chunks if self.states is None else first + self.states.path(table)[1]
        # What is held comes first: a child is held no more often than its parent.
        ends = range(first, max(first, reusable))
        return total - first - bisect_left(ends, True, key=lambda chunk: not self._is_held(table.digest(chunk)))

    def _is_held(self, digest: bytes) -> bool:
        node = self.tree.find(digest)
        return node is not None and node.refs > 0

    def room(self, table: ChunkTable) -> int:
        """Tokens by which the table can be extended without preempting anybody."""
        return -table.length % CHUNK + self.available_for(table.account) * CHUNK

    def yields(self, table: ChunkTable, taker: ChunkTable) -> bool:
        """Whether `taker` may have more room once the table is closed: not if what the table holds stays its own."""
        own, other = table.account, taker.account
        if own is other:
            return True
        if other is not None and not other.left:
            return False
        if own is None or own.over:
            return True
        public = table.public_chunks
        return public > 0 and own not in (table.nodes[public - 1].guards or {})

    def extend(
        self, table: ChunkTable, count: int, owners: Owners | None = None, by_block: bool = True, drafted: int = 0
    ) -> bool:
        """Makes room for the next `count` tokens, which the coming step computes; they are known, but for the last
        `drafted` ones (see `keep`). False, with nothing changed, when there is not enough on all ranks together.

        A new chunk goes to the rank of the chunk before it if both are in one block. At the first chunk of a block
        the rank is that of `owners`, else of `table.place`, else the cache's own choice. by_block=False: `owners` (or
        `table.place`) is asked for each new chunk. A rank asked for that has nothing left is replaced by any other.
        Raises ValueError, with nothing changed, for a rank that does not exist.
        """
        if count > self.room(table):
            return False
        end = table.length + count
        if end - drafted > len(table.tokens):
            raise ValueError(f"cannot extend to {end - drafted} tokens: only {len(table.tokens)} are known")
        asked, ask = {}, owners or table.place
        if ask is not None and self.ranks > 1:
            asked = self._placement.asked(table, end, ask, self.block_chunks if by_block else 1)
        start = table.length
        while table.length < end:
            chunk = table.length // CHUNK
            if chunk == len(table.nodes):
                table.append(self._new_node(table, chunk, asked.get(chunk)))
            table.length = min(end, (chunk + 1) * CHUNK)
            if table.length % CHUNK == 0 and table.length <= end - drafted:
                self._names.fill(table, chunk)
        if self.states is not None and end > start:
            self.states.advance(table, start, drafted)
        return True

    def grow(self, table: ChunkTable) -> bool:
        """`extend` by one token where the last chunk has a place left, which is the usual step of decoding; False where
        it has none. (A step does this for every sequence: it is kept apart for speed.)"""
        if table.length % CHUNK == 0:
            return False
        table.length += 1
        if table.length % CHUNK == 0:
            self._names.fill(table, table.length // CHUNK - 1)
        if self.states is not None:
            self.states.advance(table, table.length - 1)
        return True

    def grow_unknown(self, table: ChunkTable) -> None:
        """`extend` by the token behind all known ones, for which there is room; `arrived` is to follow."""
        if table.length % CHUNK == 0:
            table.append(self._new_node(table, table.length // CHUNK, None))
        table.length += 1
        if self.states is not None:
            self.states.advance(table, table.length - 1)

    def arrived(self, table: ChunkTable) -> None:
        """The last token of a table that grew by an unknown one is known."""
        if table.length % CHUNK == 0:
            self._names.fill(table, table.length // CHUNK - 1)

    def _take_slot(self, table: ChunkTable, chunk: int, asked: int | None) -> int:
        if self.ranks == 1:
            slot = self.tree.take_slot(account=table.account)
        else:
            rank = self._placement.choose(table, chunk, self.block_chunks) if asked is None else asked
            slot = self.tree.take_slot(rank, table.account)
            self.displaced += slot is not None and self.pool.rank_of(slot) != rank
        assert slot is not None, "room() promised a slot"
        return slot

    def _new_node(self, table: ChunkTable, chunk: int, asked: int | None) -> Node:
        slot = self._take_slot(table, chunk, asked)
        node = Node(slot, None, None, writer=table)
        self.tree.charge(node, table.account)
        whole = (chunk + 1) * CHUNK <= len(table.tokens)
        if table.shares and whole and self.tree.find(table.digest(chunk)) is None:
            self._names.give(table, chunk, node)
        return node

    def plan_ahead(self) -> None:
        """While the step planned before is under way another one is planned, that may come to nothing yet: what it
        would complete is nobody else's until `launched`."""
        self._names.plan_ahead()
        if self.states is not None:
            self.states.plan_ahead()

    def launched(self) -> None:
        """After the commit of the step before: the step that was planned ahead, if there is one, is under way, or is
        the next to be computed. What it completes can be shared by whatever is computed behind it."""
        self._names.launched(self.tables)
        if self.states is not None:
            self.states.launched()

    def commit(self) -> None:
        """After a step: names the private chunks that it filled, or gives them up for their twin in the tree."""
        self._names.settle(self.tables, self.block_chunks)
        if self.states is not None:
            self.states.commit()

    def keep(self, table: ChunkTable, start: int, length: int) -> None:
        """After the commit of a step from `start` on that computed drafted tokens: the table keeps `length` tokens,
        all known now, or as many of them as have a recurrent state. Chunks of the others are given up. Nobody has seen
        them: what drafted tokens have filled gets its name here, if they are kept."""
        if self.states is not None:
            length = self.states.settle(table, length)
        self._drop_from(table, chunks_for(length))
        table.length = length
        for chunk in range(start // CHUNK, length // CHUNK):
            node = table.nodes[chunk]
            if table.shares and node.digest is None and not node.complete:
                self._names.later(table, chunk)
        self._names.settle(self.tables, self.block_chunks)
        if self.states is not None:
            self.states.keep_drafted(table)

    def close(self, table: ChunkTable) -> None:
        """Lets go of everything the table holds; complete named chunks stay in the tree until evicted, and so does its
        last one for its rows, where these can be copied (kv.partial)."""
        next(tables for tables in (self.tables, self.parked, self.pinned) if table in tables).remove(table)
        self.tree.now = time.monotonic()
        if table is self._latest:
            self._latest = None
        if self.states is not None:
            self.states.close(table)
        self._names.keep_tail(table)
        self._drop_from(table, 0)

    def park(self, table: ChunkTable) -> None:
        """`close`, but holding on to the complete named chunks, until the table is closed for good."""
        if self.states is not None:
            self.states.close(table)
        kept = next((i for i, node in enumerate(table.nodes) if node.digest is None or not node.complete), None)
        if kept is not None:
            self._names.keep_tail(table)
            self._drop_from(table, kept)
        self.tables.remove(table)
        if table.nodes:
            self.parked.add(table)

    def pin(self, table: ChunkTable) -> None:
        """A table that has just been opened holds what `reuse` attaches to it, for no sequence's sake."""
        self.tables.remove(table)
        self.pinned.add(table)

    def _drop_from(self, table: ChunkTable, chunk: int) -> None:
        for node in reversed(table.cut(chunk)):
            self.tree.release(node)

    def truncate(self, table: ChunkTable, chunk: int) -> None:
        """Before `commit`: gives up the chunks from `chunk` on, which what was to be stored in them never reached. None
        of them may have a name."""
        assert all(node.digest is None for node in table.nodes[chunk:]), "others may have seen the chunk"
        self._drop_from(table, chunk)
        self._names.forget(table, chunk)

    def take_loose(self, owners: Sequence[int], account: Account | None = None) -> list[Node] | None:
        """New chunks of the account that no table has yet, to be written into: each on the rank named; None, with
        nothing taken, if there are not so many. The chunks of a block must be given one owner."""
        if len(owners) > self.available_for(account) or (self.ranks > 1 and self._too_many(owners, account)):
            return None
        nodes = []
        for rank in owners:
            slot = self.tree.take_slot(rank if self.ranks > 1 else None, account)
            assert slot is not None, "available promised a slot"
            nodes.append(Node(slot, None, None, writer=self))
            self.tree.charge(nodes[-1], account)
        self.loose.update(nodes)
        return nodes

    def _too_many(self, owners: Sequence[int], account: Account | None) -> bool:
        return any(count > self.tree.available_on(rank, account) for rank, count in Counter(owners).items())

    def free_loose(self, nodes: list[Node]) -> None:
        """Gives loose chunks back."""
        for node in nodes:
            self.loose.remove(node)
            self.tree.release(node)

    def attach(self, table: ChunkTable, nodes: list[Node]) -> None:
        """Loose chunks become the next ones of a table, which ends with a full chunk. They are the table's own until
        `confirm`: `truncate` or `detach` can take them away."""
        assert table.length % CHUNK == 0 and table.shares
        for node in nodes:
            self.loose.remove(node)
            node.writer = table
            table.append(node)
            table.length += CHUNK

    def detach(self, table: ChunkTable, chunk: int, count: int) -> list[Node]:
        """Makes `count` attached chunks loose again; what follows them is given up."""
        self.truncate(table, chunk + count)
        nodes = table.cut(chunk)
        for node in nodes:
            node.writer = self
        self.loose.update(nodes)
        return nodes

    def confirm(self, table: ChunkTable, chunk: int, count: int) -> None:
        """`count` attached chunks hold what they should: with the next `commit` they get names and can be shared."""
        self._names.confirm(table, range(chunk, chunk + count))

    @property
    def used(self) -> int:
        """Chunks held by tables."""
        return self.pool.total - self.available

    @property
    def unshared(self) -> int:
        """Chunks that the tables would hold if nothing were shared."""
        return sum(len(table.nodes) for table in self.tables)

    def add_stats(self, told: KVStats) -> None:
        """Writes its figures into `told`."""
        told.chunks_used, told.chunks_unshared = self.used, self.unshared
        told.chunks_cached, told.evictions = len(self.tree.idle), self.tree.evictions
        if self.states is not None:
            told.states_kept, told.state_evictions = self.states.kept, self.states.evictions

    def check(self) -> None:
        """Raises AssertionError unless pool, tree and tables agree in every count. For tests: costs a full walk."""
        self.tree.check()
        tables = (*self.tables, *self.parked, *self.pinned)
        if self.states is not None:
            self.states.check((*self.tables, *self.pinned))
        check_tables(self.tree, tables, self.loose)
