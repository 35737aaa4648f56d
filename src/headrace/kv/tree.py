"""The prefix tree: chunks of 64 tokens, named by a hash chain, shared by every request that begins alike.

One tree serves all layers; a node owns one slot of the pool. A node is `pending` while one sequence, its writer, is
still filling it, and complete afterwards; only complete nodes are shared. Complete nodes that nobody holds stay, in
the order in which they were let go, until their slot is needed (least recently used leaf first).

    root (no node) -- chunk 0 --+-- chunk 1 --- chunk 2
                                +-- chunk 1'            refs: tables that hold the node; a child's refs <= its parent's

With several ranks the tree is the same; the slots of a node's descendants may lie on any rank.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable

from headrace.kv.accounts import Account, Accounts
from headrace.kv.node import Node as Node
from headrace.kv.partial import PartialMatches
from headrace.kv.pool import SlotPool
from headrace.kv.segments import Segments
from headrace.types import CHUNK


def chain(parent: bytes, tokens: array[int], salt: bytes = b"", mark: bytes = b"") -> bytes:
    """Name of the chunk of 64 `tokens` (unsigned 32 bit) after the chunk named `parent`; `salt` separates tenants, and
    `mark` what else keys depend on: 16 bytes each, or none."""
    return hashlib.blake2b(tokens.tobytes(), digest_size=32, key=parent, salt=salt, person=mark).digest()


def tenant_mark(salt: str | None) -> bytes:
    """Whose the chunks under a salt are (Node.tenant): 16 bytes; none without a salt."""
    return b"" if salt is None else hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest()[:16]


class PrefixTree:
    """Named nodes and the order of eviction. Slots are taken from and returned to `pool`.

    idle: complete nodes that nobody holds, least recently used first. All descendants of an idle node are idle, and
    stand before it. leaving: may be set to be told of each node that is evicted, while its slot still has its content.
    forget_state: is told of each node with a recurrent state that leaves; set by whoever gives nodes states.
    now: seconds of time.monotonic as a request last came or ended. segments: the tree as listings show it.
    accounts: from the first tenant on that has a share or a limit. partial: where rows of chunks can be copied.
    With several ranks `_idle_of` has the idle nodes of each, in the same order; with one it is empty.
    """

    def __init__(self, pool: SlotPool) -> None:
        self.pool = pool
        self.nodes: dict[bytes, Node] = {}
        self.idle: OrderedDict[bytes, Node] = OrderedDict()
        self._idle_of: list[OrderedDict[bytes, Node]] = [OrderedDict() for _ in range(pool.ranks) if pool.ranks > 1]
        self.evictions = 0
        self.now = 0.0
        self.segments = Segments()
        self.accounts: Accounts | None = None
        self.partial: PartialMatches | None = None
        self._tails: dict[tuple[Account | None, int], dict[bytes, Node]] = {}
        """Idle tails of each account on each rank, least recently used first."""
        self.leaving: Callable[[Node], None] | None = None
        self.forget_state: Callable[[Node], None] | None = None

    @property
    def available(self) -> int:
        """Slots that can be had now: free ones and those of idle nodes."""
        return self.pool.free + len(self.idle)

    def available_on(self, rank: int, account: Account | None = None) -> int:
        """Slots of the rank that can be had now, all of them by `take_slot(rank, account)`."""
        if self.accounts is not None:
            return self.accounts.available_on(rank, account)
        return self.pool.free_of(rank) + len(self._idle_on(rank))

    def available_for(self, account: Account | None) -> int:
        """Slots that can be had now by `take_slot(account=account)`."""
        return self.available if self.accounts is None else self.accounts.available_for(account)

    def open_account(self, name: str) -> Account:
        """The account of that name, a new one if there is none."""
        if self.accounts is None:
            self.accounts = Accounts(self.pool, self.idle.values())
        return self.accounts.open(name)

    def charge(self, node: Node, account: Account | None) -> None:
        """A held node without children is the account's from now on."""
        if self.accounts is not None:
            self.accounts.charge(node, account)

    def _oldest(self, account: Account | None, rank: int | None = None) -> Node | None:
        """The least recently used idle node that may be evicted for the account, or a tail in its place."""
        if self.accounts is not None:
            oldest = self.accounts.oldest(account, rank)
        else:
            oldest = next(iter((self.idle if rank is None else self._idle_on(rank)).values()), None)
        return oldest and self._tail_before(oldest)

    def _tail_before(self, oldest: Node) -> Node:
        """The least recently used tail of the node's account on its rank, if there is one: it has few rows, for one
        prompt, where a whole chunk may serve many."""
        tails = self._tails.get((oldest.account, self.pool.rank_of(oldest.slot)))
        return next(iter(tails.values())) if tails else oldest

    def _idle_on(self, rank: int) -> OrderedDict[bytes, Node]:
        return self._idle_of[rank] if self._idle_of else self.idle

    def find(self, digest: bytes) -> Node | None:
        return self.nodes.get(digest)

    def take_slot(self, rank: int | None = None, account: Account | None = None) -> int | None:
        """A slot of the rank, at the price of its least recently used idle node if none is free (LRU), or of a tail of
        the same account in its place; where the rank has nothing left, or none is asked for, a slot of any. None if all
        are held, or are kept from the account.

        Nodes leave the tree leaf by leaf. The oldest idle node of all is a leaf. The oldest of one rank may have idle
        descendants on other ranks, and these leave with it: they were let go before it, hence before every other idle
        node of the rank. (A younger leaf of the rank instead would go against the order of use, and keep what nobody
        asks for; a slot of another rank would cut a block in two.)
        """
        if account is not None and account.owned >= account.limit:
            if (own := account.idle.first()) is None:
                return None
            self._evict(self._tail_before(own))
        slot = self.pool.take(rank)
        if slot is None and rank is not None:
            if (oldest := self._oldest(account, rank)) is not None:
                self._evict(oldest)
                return self.pool.take(rank)
            slot = self.pool.take()
        if slot is None and (oldest := self._oldest(account)) is not None:
            self._evict(oldest)
            slot = self.pool.take()
        return slot

    def _evict(self, node: Node) -> None:
        """Removes an idle node after all of its descendants, leaf by leaf."""
        path = [node]
        while path:
            if children := path[-1].children:
                path.append(next(iter(children.values())))
            else:
                if self.leaving is not None:
                    self.leaving(path[-1])
                self._remove(path.pop())
                self.evictions += 1

    def insert(self, node: Node, digest: bytes, parent: Node | None) -> None:
        """Names a node that its holder owns alone. Raises ValueError if the name exists."""
        if digest in self.nodes:
            raise ValueError("a chunk of that name is in the tree already")
        node.digest, node.parent = digest, parent
        if parent is not None:
            parent.children[digest] = node
            node.number = parent.number + 1
        self.nodes[digest] = node
        node.used = self.now
        self.segments.enter(node)
        if self.accounts is not None:
            self.accounts.enter(node)

    def insert_tail(self, node: Node, digest: bytes, rows: int) -> None:
        """Names a chunk that is not whole, for the sake of its first rows. It has no place among the others: they may
        leave before it, or come again. It is never attached, nor stored below. Raises ValueError if the name exists."""
        if digest in self.nodes:
            raise ValueError("a tail of that name is in the tree already")
        node.digest, node.rows, node.stored, node.writer = digest, rows, True, None
        self.nodes[digest] = node

    def drop(self, node: Node) -> None:
        """Forgets a tail, if it is idle and has not been evicted."""
        if not node.whole and self.idle.get(node.digest or b"") is node:
            self._remove(node)

    def hold(self, node: Node) -> None:
        """One more table uses a complete node. (No tail: they are copied from, never attached.)"""
        if node.refs == 0:
            assert node.digest is not None
            del self.idle[node.digest]
            if self._idle_of:
                del self._idle_of[self.pool.rank_of(node.slot)][node.digest]
            if self.accounts is not None:
                self.accounts.wake(node)
        node.refs += 1
        node.hits += 1
        node.used = self.now

    def release(self, node: Node) -> None:
        """One table fewer uses the node. Tables release from their last chunk to their first."""
        node.refs -= 1
        if node.refs:
            return
        node.used = self.now
        if node.digest is None or not node.complete:
            self._remove(node)
        else:
            if not node.whole:
                self._tails.setdefault(self._of_tail(node), {})[node.digest] = node
            self.idle[node.digest] = node
            if self._idle_of:
                self._idle_of[self.pool.rank_of(node.slot)][node.digest] = node
            if self.accounts is not None:
                self.accounts.rest(node)

    def _of_tail(self, node: Node) -> tuple[Account | None, int]:
        return node.account, self.pool.rank_of(node.slot)

    def _leave_tails(self, node: Node) -> None:
        if tails := self._tails.get(key := self._of_tail(node)):
            tails.pop(node.digest or b"", None)
            if not tails:
                del self._tails[key]

    def clear(self) -> None:
        """Forgets all idle nodes."""
        while self.idle:
            self._remove(next(iter(self.idle.values())))

    def _remove(self, node: Node) -> None:
        if self.forget_state is not None and node.state >= 0:
            self.forget_state(node)
        if node.digest is not None:
            del self.nodes[node.digest]
            self.idle.pop(node.digest, None)
            if not node.whole:
                self._leave_tails(node)
            if self._idle_of:
                self._idle_of[self.pool.rank_of(node.slot)].pop(node.digest, None)
            if node.parent is not None:
                del node.parent.children[node.digest]
            if node.whole:
                self.segments.leave(node)
            if self.partial is not None:
                self.partial.leave(node)
        if self.accounts is not None:
            self.accounts.leave(node)
        self.pool.give(node.slot)

    def check(self) -> None:
        """Raises AssertionError unless names, children, idleness and the order of eviction agree."""
        children: dict[int, dict[bytes, Node]] = {}
        for digest, node in self.nodes.items():
            assert node.digest == digest, "a node stands under another name"
            assert (node.refs == 0) == (digest in self.idle), "idle means complete and held by nobody"
            assert node.refs >= 0 and (node.refs or node.complete), "a pending node has its writer as holder"
            assert node.complete or node.refs == 1, "a pending node is not shared"
            if node.parent is not None:
                assert self.nodes.get(node.parent.digest or b"") is node.parent, "a parent left before its child"
                assert node.parent.refs >= node.refs, "a child is held more often than its parent"
                children.setdefault(id(node.parent), {})[digest] = node
        for node in self.nodes.values():
            assert node.children == children.get(id(node), {}), "a node knows other children than it has"
        self.segments.check({digest: node for digest, node in self.nodes.items() if node.whole})
        if self.partial is not None:
            self.partial.check(self.nodes)
        self._check_idle()

    def _check_idle(self) -> None:
        for rank, idle in enumerate(self._idle_of):
            own = [digest for digest, node in self.idle.items() if self.pool.rank_of(node.slot) == rank]
            assert list(idle) == own, "the idle nodes of a rank are others, or in another order, than among all"
        tails: dict[tuple[Account | None, int], list[bytes]] = {}
        for digest, node in self.idle.items():
            if not node.whole:
                tails.setdefault(self._of_tail(node), []).append(digest)
        assert {key: list(each) for key, each in self._tails.items()} == tails, "idle tails, in order of use"
        age = {digest: order for order, digest in enumerate(self.idle)}
        for digest, node in self.idle.items():
            parent = node.parent
            if parent is not None and parent.refs == 0:
                assert age[digest] < age[parent.digest or b""], "an idle parent would be evicted before its child"


def token_array(tokens: list[int]) -> array[int]:
    """Tokens as unsigned 32-bit integers, the form that is hashed."""
    return array("I", tokens)


assert array("I").itemsize == 4 and CHUNK == 64
