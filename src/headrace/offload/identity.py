"""What stored keys and values were made by: the model by its content, and everything else that their bits depend on.

The names of chunks begin with this identity, so that a directory or a server of chunks may be shared by any number of
engines: each finds only what it would have computed itself, to the bit. The path of the model's folder and the times of
its files are no part of it: chunks fit the same model elsewhere, on another host too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from headrace.device import current
from headrace.files import open_given, open_own, read_own
from headrace.kernels import cpu, dispatch
from headrace.kv.storage import LAYOUT
from headrace.logs import shown
from headrace.models.files import config_content, weight_files
from headrace.version import __version__

log = logging.getLogger(__name__)

VERSION = 8
"""To be raised when this version of Headrace would compute or store other bits than the one before."""

MEMO = "models.json"
"""In the offload directory: digests of weight files, so that a restart need not read them again."""

MOST_BYTES = 64 << 20
"""Of a config.json or a memo; the largest known are some hundred kilobytes."""

BLOCK = 8 << 20
SAMPLES, SAMPLE = 64, 64 << 10
"""Pieces of a file that model_sample looks at, and bytes of each."""

SETTLED_NS = 2_000_000_000
"""A file changed more recently is not remembered: it may change again without its times showing it."""

Facts = dict[str, Any]


def model_identity(folder: Path, cache_dir: Path | None = None) -> bytes:
    """32 bytes from the content of config.json, where there is one, and of the weights, whole files (XXH3, 128 bits
    each; SHA-256 over all).

    Reads the weights as fast as the disk gives them, or not at all where `cache_dir` remembers them: by path, size,
    times, device and inode. A memo that cannot be read, trusted or written is done without.
    Raises OSError where the model cannot be read, and what models.files.weight_files raises.
    """
    known = _Memo(None if cache_dir is None else cache_dir / MEMO)
    facts = [b"headrace model", hashlib.sha256(config_content(folder, MOST_BYTES)).digest()]
    for path in weight_files(folder):
        facts += [path.name.encode(), known.digest(path)]
    known.save()
    return _hash(facts)


def model_sample(folder: Path) -> bytes:
    """32 bytes that tell models apart without reading them: of config.json, of the weights' names and sizes, and of
    SAMPLES pieces of each file, its first and last among them; of a small file that is all of it. Fine-tuning changes
    every number, and so these. Raises as model_identity."""
    facts = [b"headrace sample", hashlib.sha256(config_content(folder, MOST_BYTES)).digest()]
    for path in weight_files(folder):
        facts += [path.name.encode(), _sampled(path)]
    return _hash(facts)


def _sampled(path: Path) -> bytes:
    with open_given(path) as file:
        size = os.fstat(file.fileno()).st_size
        last = max(0, size - SAMPLE)
        hashed = xxhash.xxh3_128(size.to_bytes(8, "little"))
        for place in sorted({last * part // (SAMPLES - 1) for part in range(SAMPLES)}):
            hashed.update(os.pread(file.fileno(), SAMPLE, place))
    return hashed.digest()


def chunk_identity(
    model: bytes, *, dtype: str, kv_dtype: str, quantization: str, backend: str, formats: Iterable[str] = ("raw",)
) -> bytes:
    """32 bytes from the model's identity and all that a chunk's bits depend on beside it: types, rounding of the
    weights, layout, the kernels and their instruction set, the GPU that computes, torch (whose products serve where
    there are no kernels), and versions.

    formats: those of the tiers. What came back rounded goes on into the chunks after it, so an engine that rounds
    shares nothing with one that does not.
    """
    facts = {
        "headrace": __version__,
        "layout": LAYOUT,
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "quantization": quantization,
        "backend": backend,
        "formats": sorted(set(formats)),
        **arithmetic(backend),
    }
    return _hash([b"headrace chunk", model, json.dumps(facts, sort_keys=True).encode()])


def fingerprint(identity: bytes, backend: str, adapters: Sequence[bytes] = ()) -> str:
    """'fp_' and 16 hexadecimal digits: of what chunks are made by (KVCache.identity), of what computes here, and of the
    adapters' digests.

    Where chunks outlive the engine that is the content of the model; else its place, size and times, so that a copy
    elsewhere has another one."""
    return "fp_" + _hash([identity, json.dumps(arithmetic(backend), sort_keys=True).encode(), *adapters]).hex()[:16]


def arithmetic(backend: str) -> dict[str, Any]:
    """What computes here: engines on which this agrees get the same bits. Another GPU may give others, and so may
    another compiler of its kernels."""
    kernels = {name: choice.implementation for name, choice in dispatch.table().items() if name != "layer"}
    return {
        "version": VERSION,
        "isa": cpu.isa() if cpu.available() else "none",
        "kernels": kernels,
        "threads": torch.get_num_threads() if kernels["linear"] == "torch" else None,  # torch cuts its sums by them
        "torch": torch.__version__,
        "torch isa": torch.backends.cpu.get_cpu_capability(),
    } | (_on_gpu() if backend == "triton" else {})


def _on_gpu() -> dict[str, Any]:
    import triton

    return {"gpu": current().name, "triton": triton.__version__}


def content(path: Path) -> bytes:
    """XXH3 of a whole file, 16 bytes. Raises OSError."""
    hashed, buffer = xxhash.xxh3_128(), bytearray(BLOCK)
    with open_given(path) as file:
        while count := file.readinto(buffer):
            hashed.update(memoryview(buffer)[:count])
    return hashed.digest()


def _hash(facts: list[bytes]) -> bytes:
    """Each fact with its length before it, so that none can run into the next."""
    return hashlib.sha256(b"".join(len(fact).to_bytes(8, "little") + fact for fact in facts)).digest()


class _Memo:
    """Digests of files, in a JSON file: {path: {facts of the file, digest, sum of this entry}}."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._changed: dict[str, Facts] = {}
        self._known = {} if path is None else _read(path)

    def digest(self, path: Path) -> bytes:
        """Content of the file, remembered or read."""
        name, before = str(path.resolve()), _facts(path)
        entry = self._known.get(name)
        if isinstance(entry, dict) and entry == _entry(name, before, str(entry.get("digest"))):
            with contextlib.suppress(ValueError):
                return bytes.fromhex(entry["digest"])
        began = time.monotonic()
        found = content(path)
        log.debug("%s: content read in %.1f s", path.name, time.monotonic() - began)
        settled = time.time_ns() - before["ctime_ns"] >= SETTLED_NS
        if settled and _facts(path) == before:
            self._changed[name] = _entry(name, before, found.hex())
        return found

    def save(self) -> None:
        """Adds what is new, as a whole or not at all."""
        if self._path is None or not self._changed:
            return
        own = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(open_own(own, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
                json.dump(_read(self._path) | self._changed, file, indent=1)
            own.replace(self._path)
        except OSError as error:
            log.warning("digests of the weights cannot be kept in %s (%s): each start reads them", self._path, error)
            with contextlib.suppress(OSError):
                own.unlink()


def _facts(path: Path) -> Facts:
    found = path.stat()
    return {"size": found.st_size, "mtime_ns": found.st_mtime_ns, "ctime_ns": found.st_ctime_ns,
            "device": found.st_dev, "inode": found.st_ino}  # fmt: skip


def _entry(name: str, facts: Facts, digest: str) -> Facts:
    told = json.dumps([name, facts, digest], sort_keys=True).encode()
    return {**facts, "digest": digest, "sum": xxhash.xxh3_64_hexdigest(told)}


def _read(path: Path) -> dict[str, Any]:
    """The memo's entries; none where it is not there or is no such file."""
    try:
        found = json.loads(read_own(path, MOST_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s is not used: %s", path, shown(error))
        return {}
    return found if isinstance(found, dict) else {}
