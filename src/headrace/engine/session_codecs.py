"""How chunks and states of sessions are written to files and read, where one rank has all of the pool in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from headrace.config import EngineConfig
from headrace.engine.capacity import Capacity
from headrace.engine.executor import Executor
from headrace.engine.runner import Runner
from headrace.engine.session_places import no_file
from headrace.kernels.backend import backend_of
from headrace.offload.chunk_codec import ChunkCodec
from headrace.offload.frame import DamagedBlob
from headrace.offload.state_codec import StateCodec


def check_blob(codec: ChunkCodec, blob: memoryview, digest: bytes) -> None:
    """Raises DamagedBlob unless all of it is what that chunk was when it was saved."""
    header = codec.header(blob, digest, "k")
    if header.format != "raw":
        raise DamagedBlob(f"is stored as {header.format}")
    start, size = codec.header_bytes, header.section_bytes
    for section in range(header.layers):
        header.check(section, blob[start + section * size : start + (section + 1) * size])


@contextlib.contextmanager
def naming(what: str) -> Generator[None, None, None]:
    try:
        yield
    except DamagedBlob as error:
        raise DamagedBlob(f"is damaged or of other tokens: {what}: {error}") from None


def check_file(codec: ChunkCodec | None) -> None:
    if codec is None:
        raise no_file()


def codecs_of(
    config: EngineConfig, capacity: Capacity, identity: bytes, executor: Executor
) -> tuple[ChunkCodec | None, StateCodec | None]:
    """Of the pool, where one rank has all of it in this host's memory."""
    if not isinstance(executor, Runner) or config.model.on_gpu:
        return None, None
    decoder = executor.decoder
    spec = decoder.config.attention
    layout = backend_of(capacity.backend).layout(decoder.dtype, spec.shape(0)[1])
    codec = ChunkCodec(executor.storage, spec, identity, decoder.dtype, layout)
    return codec, None if executor.states is None else StateCodec(executor.states, identity)
