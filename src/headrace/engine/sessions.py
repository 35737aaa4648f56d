"""Saving and loading of named sessions, in pieces between steps; a thread of its own encodes, writes, reads and checks.

    save    the session's chunks are held  ->  the thread writes them to a file  ->  they are let go of
    load    a few chunks of the pool are taken, loose  ->  the thread fills them from the file, each checked against
            the name that tokens and salt make  ->  they get these names  ->  the next few ...  ->  they are let go of

What is loaded is then cached like any prefix that nobody uses. A session in the tiers is a file of its tokens alone,
and chunks that are known to be stored: a request that begins with them restores them.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeVar

import torch

from headrace.config import EngineConfig
from headrace.engine.below import Below
from headrace.engine.calls import DeleteSession, ListSessions, LoadSession, ReadSession, SaveSession
from headrace.engine.capacity import Capacity
from headrace.engine.executor import Executor
from headrace.engine.session_codecs import check_blob, check_file, codecs_of, naming
from headrace.engine.session_places import check_tiers
from headrace.engine.stored_prefixes import StoredPrefixes
from headrace.kv.cache import KVCache
from headrace.kv.chunk_table import ChunkTable
from headrace.kv.table_state import NONE
from headrace.logs import shown
from headrace.offload.frame import DamagedBlob
from headrace.offload.sessions.names import DAMAGED, NO_STORAGE, NOT_FOUND, check_name
from headrace.offload.sessions.session_file import (
    BadSession,
    Metadata,
    Place,
    SessionReader,
    Sizes,
    sum_of,
    token_bytes,
)
from headrace.offload.sessions.session_folder import SessionFolder
from headrace.offload.tiers.base import BlobParts
from headrace.types import CHUNK, InvalidRequest

PIECE = 8
"""Chunks that are loaded at a time."""

PAUSE_S = 0.002
"""So long does an engine without requests wait for the thread before it looks for requests again."""

STORED_S = 60.0
"""So long may the tiers take to write what a session has."""

T = TypeVar("T")
Steps = Generator[None, None, T]


class Stepping(Protocol):
    """What is known of the engine between two steps."""

    cache: KVCache
    below: Below

    @property
    def has_work(self) -> bool: ...


class Sessions:
    """The saved sessions of one engine: of its cache, executor and tiers. namespace: ModelConfig.rope_namespace."""

    def __init__(
        self,
        config: EngineConfig,
        capacity: Capacity,
        cache: KVCache,
        executor: Executor,
        tiers: StoredPrefixes | None,
        namespace: Callable[[int], str],
    ) -> None:
        self._config, self._capacity, self._cache = config, capacity, cache
        self._below, self._namespace, own = tiers, namespace, config.sessions
        assert own.path is not None
        self.folder = SessionFolder(own.path, own.most_bytes, own.most_tenant_bytes, own.per_tenant)
        self._thread = ThreadPoolExecutor(1, "headrace-sessions")
        self._codec, self._states = codecs_of(config, capacity, cache.identity, executor)
        self._closing = threading.Event()

    def close(self) -> None:
        """Ends the thread; a session that is being saved is given up, and nothing is left of it."""
        self._closing.set()
        self._thread.shutdown(wait=True, cancel_futures=True)

    # -- calls

    def save(self, core: Stepping, call: SaveSession) -> Steps[dict[str, Any]]:
        """Answer: see _told; `why` where the tiers did not take all. Chunks that are not cached are not saved."""
        began = time.monotonic()
        check_name(call.name)
        self._check_tokens(call.tokens)
        offload = self._tiers(call)
        table = self._open_table(call.tokens, call, call.adapter)
        try:
            core.cache.reuse(table)
            state = self._encoded_state(table) if offload is None else None
            if offload is not None and offload.states is not None and table.nodes:
                offload.states.store(table.nodes[-1])
            core.cache.park(table)  # no sequence may want for a recurrent state because of it
            chunks, parts = len(table.nodes), []
            if offload is None:
                parts = [(node.slot, table.digest(chunk)) for chunk, node in enumerate(table.nodes)]
            else:
                chunks = yield from self._store(core, offload, table)
            size = yield from self._waited(core, self._write, call, parts, state)
        finally:
            self._let_go(table)
        return _told(call.tokens, chunks, chunks, size, began, "" if offload is None else _lacking(call.tokens, chunks))

    def read(self, core: Stepping, call: ReadSession) -> Steps[dict[str, Any]]:
        """Answer: the tokens of a session, where its chunks are, and the adapter that they are of."""
        with (yield from self._waited(core, self._opened, call)) as reader:
            self._check_found(reader, call)
            return {"tokens": reader.tokens, "to": reader.metadata.place, "adapter": reader.metadata.adapter}

    def load(self, core: Stepping, call: LoadSession) -> Steps[dict[str, Any]]:
        """Answer: see _told; `why` where not all came that was saved."""
        began = time.monotonic()
        with (yield from self._waited(core, self._opened, call)) as reader:
            self._check_found(reader, call)
            table = self._open_table(reader.tokens, call, reader.metadata.adapter)
            try:
                if reader.metadata.place == "tier":
                    chunks = yield from self._found(core, self._tiers(call), table)
                    why = _lacking(reader.tokens, chunks)
                    return _told(reader.tokens, chunks, chunks, reader.size, began, why)
                check_file(self._codec)
                core.cache.reuse(table)
                if core.cache.states is not None and table.length < reader.sizes.chunks * CHUNK:
                    core.cache.close(table)
                    table = self._open_table(reader.tokens, call, reader.metadata.adapter)
                why = yield from self._fill(core, reader, table)
                good = (node.digest is not None and node.complete for node in table.nodes)
                chunks = next((i for i, there in enumerate(good) if not there), len(table.nodes))
                if core.cache.states is not None and table.track.slot == NONE:
                    chunks, why = 0, why or "there is no state behind its last chunk"
            finally:
                self._let_go(table)
            return _told(reader.tokens, reader.sizes.chunks, chunks, reader.size, began, why)

    def listed(self, core: Stepping, call: ListSessions) -> Steps[list[dict[str, Any]]]:
        found = yield from self._waited(core, self.folder.listed, call.tenant)
        return [{"name": each.name, "bytes": each.size, "saved": int(each.saved_s)} for each in found]

    def delete(self, core: Stepping, call: DeleteSession) -> Steps[None]:
        yield from self._waited(core, self.folder.delete, call.tenant, call.name)

    # -- on the engine's thread

    def _waited(self, core: Stepping, work: Callable[..., T], *args: Any) -> Steps[T]:
        """What the thread makes of it. Whoever gives up waiting does so when the thread is done."""
        future: Future[T] = self._thread.submit(work, *args)
        try:
            while not future.done():
                if not core.has_work:
                    wait([future], PAUSE_S)
                yield
        finally:
            wait([future])
        try:
            return future.result()
        except (BadSession, DamagedBlob) as error:
            raise InvalidRequest(f"the file of this session {error}", "name", DAMAGED) from None
        except OSError as error:
            told = f"sessions_dir {str(self.folder.root)!r}: {error.strerror or error}"
            raise InvalidRequest(told, None, NO_STORAGE) from None

    def _open_table(self, tokens: list[int], call: SaveSession | LoadSession, adapter: str) -> ChunkTable:
        """With one token more, so that the last whole chunk of the session may be taken as well. adapter: its name.
        Raises InvalidRequest."""
        start = self._capacity.adapter_start(adapter, tokens)
        namespace, accounts = self._namespace(len(tokens)), self._cache.tree.accounts
        account = None if accounts is None else accounts.named.get(call.tenant)
        return self._cache.open(
            [*tokens, 0],
            salt=call.salt,
            public_tokens=call.public_tokens,
            namespace=namespace,
            account=account,
            tenant=call.tenant,
            mark=self._capacity.adapter_mark(adapter, start),
        )

    def _let_go(self, table: ChunkTable) -> None:
        if table in self._cache.tables or table in self._cache.parked:
            self._cache.close(table)

    def _check_found(self, reader: SessionReader, call: ReadSession | LoadSession) -> None:
        if reader.metadata.salt != self._mark(call.salt):
            raise InvalidRequest(f"no session {call.name!r} is saved under this cache_salt", "name", NOT_FOUND)
        self._check_tokens(reader.tokens, "name")

    def _check_tokens(self, tokens: list[int], param: str = "prompt") -> None:
        capacity = self._capacity
        if not tokens or len(tokens) > capacity.max_model_len:
            told = (
                f"a session has 1 to {capacity.max_model_len:,} tokens here (max_model_len), this one {len(tokens):,}"
            )
            raise InvalidRequest(told, param)
        if not (min(tokens) >= 0 and max(tokens) < capacity.vocab_size):
            raise InvalidRequest(f"a token is outside the vocabulary of {capacity.vocab_size}", param)

    def _tiers(self, call: SaveSession | LoadSession) -> StoredPrefixes | None:
        """What lies below the pool, if the session's chunks are kept there. Raises InvalidRequest for a place that this
        engine does not have."""
        if isinstance(call, SaveSession) and call.to == "file":
            check_file(self._codec)
            return None
        check_tiers(self._config)
        return self._below

    def _mark(self, salt: str | None) -> str:
        """What tells a salt from others, and not which it is."""
        if salt is None:
            return ""
        key = hashlib.sha256(self._cache.identity).digest()
        return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16, key=key).hexdigest()

    def _encoded_state(self, table: ChunkTable) -> BlobParts | None:
        if self._states is None or not table.nodes:
            return None
        return self._states.encode(table.track.slot, table.digest(len(table.nodes) - 1))

    def _fill(self, core: Stepping, reader: SessionReader, table: ChunkTable) -> Steps[str]:
        """Puts the chunks of the file behind those of the table. Why it ended before the last; empty if it did not."""
        cache, total = core.cache, reader.sizes.chunks
        while (first := len(table.nodes)) < total:
            if not cache.available_for(table.account):
                core.below.make_room()
            count = min(PIECE, total - first, cache.available_for(table.account))
            nodes = cache.take_loose([0] * count, table.account) if count else None
            if not nodes:
                return "the pool has no room for more: raise kv_cache_tokens"
            digests = [table.digest(chunk) for chunk in range(first, first + count)]
            slots = [node.slot for node in nodes]
            try:
                yield from self._waited(core, self._read_chunks, reader, first, digests, slots)
            except BaseException:
                cache.free_loose(nodes)
                raise
            for node in nodes:
                node.activations = False
            cache.attach(table, nodes)
            cache.confirm(table, first, count)
            cache.commit()
        return (yield from self._fill_state(core, reader, table))

    def _fill_state(self, core: Stepping, reader: SessionReader, table: ChunkTable) -> Steps[str]:
        states = core.cache.states
        if states is None or table.track.slot != NONE or not table.nodes:
            return ""
        slot = states.borrow()
        if slot is None:
            return "no recurrent state is free: raise recurrent_states"
        try:
            yield from self._waited(core, self._read_state, reader, table.digest(len(table.nodes) - 1), slot)
        except BaseException:
            states.give_back(slot)
            raise
        states.adopt(table, slot)
        core.cache.commit()
        return ""

    def _store(self, core: Stepping, offload: StoredPrefixes, table: ChunkTable) -> Steps[int]:
        """Has the tiers given what they lack of the table's chunks; how many they have then, from the first on."""
        storer = offload.writeback.storer
        for batch in storer.batches([node for node in table.nodes if not node.stored]):
            storer.store(batch)
            yield
        end = time.monotonic() + STORED_S
        while offload.tiers.queued_blobs and time.monotonic() < end:
            if not core.has_work:
                time.sleep(PAUSE_S)
            yield
        return (yield from self._found(core, offload, table))

    def _found(self, core: Stepping, offload: StoredPrefixes | None, table: ChunkTable) -> Steps[int]:
        """How many chunks from the first on the tiers have."""
        assert offload is not None
        count = (len(table.tokens) - 1) // CHUNK
        lookup = offload.source.look([table.digest(chunk) for chunk in range(count)], 0)
        while not lookup.done:
            if not core.has_work:
                lookup.wait_briefly(PAUSE_S)
            yield
        return len(lookup.found)

    # -- on the thread

    def _opened(self, call: ReadSession | LoadSession) -> SessionReader:
        reader = self.folder.open(call.tenant, call.name)
        if reader.metadata.identity != self._cache.identity.hex():
            reader.close()
            raise BadSession("is of another model, version or setting that its bits depend on; save it again")
        if why := self._foreign(reader):
            reader.close()
            raise BadSession(why)
        if reader.metadata.place == "file" and self._codec is not None:
            state = 0 if self._states is None or not reader.sizes.chunks else self._states.blob_bytes
            if reader.sizes[1:3] != (self._codec.blob_bytes("k", "raw"), state):
                reader.close()
                raise BadSession("has chunks of another size than this engine's")
        return reader

    def _foreign(self, reader: SessionReader) -> str:
        """What is wrong with the adapter that a session is of; empty for nothing, and for one of the model."""
        name, digest = reader.metadata.adapter, reader.metadata.adapter_digest
        if not name:
            return ""
        told, own = f"is of the adapter {shown(repr(name[:100]))}", self._capacity.adapter_of(name)
        if own is None:
            return f"{told}, which this engine does not have; name it with lora_modules"
        if own.digest != digest:
            return f"{told} as other files made it; save it again"
        return "" if own.start(reader.tokens) is not None else f"{told}, which none of its tokens invokes"

    def _write(self, call: SaveSession, chunks: list[tuple[int, bytes]], state: BlobParts | None) -> int:
        """chunks: slots and names. The size of the file."""
        tokens, codec = token_bytes(call.tokens), self._codec
        each = 0 if codec is None else codec.blob_bytes("k", "raw")
        state_bytes = sum(len(part) for part in state or ())
        sizes = Sizes(len(chunks), each, state_bytes, len(call.tokens))
        place: Place = "tier" if call.to == "tier" else "file"
        identity = self._cache.identity.hex()
        own = self._capacity.adapter_of(call.adapter)
        adapter = ("", "") if own is None else (own.name, own.digest)
        header = sizes.header(Metadata(identity, self._mark(call.salt), place, sum_of(tokens), *adapter))
        with self.folder.writing(call.tenant, call.name, len(header) + sizes.end) as file:
            file.write(header)
            for slot, digest in chunks:
                assert codec is not None, "only those of a pool that can be read are written"
                if self._closing.is_set():
                    raise InvalidRequest("the engine ends; the session is not saved", None)
                for part in codec.encode(slot, digest, "k", "raw"):
                    file.write(part)
            for part in state or ():
                file.write(part)
            file.write(tokens)
        return len(header) + sizes.end

    def _read_chunks(self, reader: SessionReader, first: int, digests: list[bytes], slots: list[int]) -> None:
        """Fills the slots with chunks first, first + 1, ..., if all of them are sound."""
        codec = self._codec
        assert codec is not None
        blobs = torch.empty(len(slots), reader.sizes.chunk_bytes, dtype=torch.uint8)
        for number, digest in enumerate(digests):
            view = memoryview(blobs[number].numpy().data).cast("B")
            reader.chunk(first + number, view)
            with naming(f"chunk {first + number}"):
                check_blob(codec, view, digest)
        at, size = codec.header_bytes, codec.section_bytes("k", "raw")
        for layer, own in enumerate(codec.sections("k")):
            sections = blobs[:, at + own.start * size : at + own.stop * size].contiguous()
            codec.load(layer, "k", "raw", sections, slots)

    def _read_state(self, reader: SessionReader, digest: bytes, slot: int) -> None:
        assert self._states is not None
        blob = torch.empty(self._states.blob_bytes, dtype=torch.uint8)
        reader.state(memoryview(blob.numpy().data).cast("B"))
        with naming("the state"):
            self._states.decode(blob, digest, slot)


def _lacking(tokens: list[int], there: int) -> str:
    """Why a session in the tiers is not whole; empty if it is. there: chunks from the first on that they have."""
    whole = (len(tokens) - 1) // CHUNK
    return f"the tiers have {there} of {whole} chunks: one may be full, or has let them go" if there < whole else ""


def _told(tokens: list[int], saved: int, there: int, size: int, began: float, why: str = "") -> dict[str, Any]:
    """tokens: of the session; saved_tokens: of the chunks that were saved; restored_tokens: of those that a request
    now finds, in the pool or in the tiers."""
    return {
        "tokens": len(tokens), "saved_tokens": saved * CHUNK, "restored_tokens": there * CHUNK, "bytes": size,
        "seconds": time.monotonic() - began, "why": why,
    }  # fmt: skip
