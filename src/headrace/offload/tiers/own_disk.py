"""The user's cache directory as the place of KV on disk: what kv_offload_path `auto` stands for, if it can be used."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

from headrace.config import SETTINGS, EngineConfig
from headrace.config.environment import CACHE_DIR, cache_folder, from_home
from headrace.config.offload import OffloadSettings
from headrace.config.tiers import DISK_GIB, NO_DISK, OWN_DISK

log = logging.getLogger(__name__)

GIB = 1 << 30
INDEX = "index.sqlite"
SHARE = 0.2
"""Of the room that is free, at the start, for KV."""
LEAST_GIB = 1.0
"""With less there is no tier."""


class Unusable(Exception):
    """Why nothing is kept in the user's cache directory."""


def kv_folder() -> Path:
    """`kv` in the user's cache directory. Raises Unusable for a user without a home."""
    try:
        folder = cache_folder() / "kv"
    except RuntimeError:
        raise Unusable("the user has no home directory") from None
    if not folder.is_absolute() and CACHE_DIR not in os.environ:
        raise Unusable("the user's home is no absolute path")
    return folder.absolute()


def resolved(config: EngineConfig) -> EngineConfig:
    """The settings with a directory in place of `auto`, or with none: silently if other settings leave no place for a
    tier, with a line in the log if the directory cannot be used. Raises ValueError for a size or a format of a tier
    that other settings rule out."""
    flat = config.flat
    if flat["kv_offload_path"] != OWN_DISK:
        return config
    if flat["kv_offload_disk_size"] == 0:
        return _without(config)
    if reason := _ruled_out(config):
        log.debug("no KV on disk: %s", reason)
        return config.replace(kv_offload_path=NO_DISK)
    try:
        folder = kv_folder()
        _prepare(folder)
        size = _room(folder, flat["kv_offload_disk_size"])
    except Unusable as error:
        log.info("KV is not kept on disk: %s; --kv-offload-path DIR names a place, %s stops this line", error, NO_DISK)
        return _without(config)
    when = "sparing" if flat["kv_offload_write"] == "auto" else flat["kv_offload_write"]
    return config.replace(kv_offload_path=str(folder), kv_offload_disk_size=size, kv_offload_write=when)


def is_own(place: str) -> bool:
    """Whether this is the directory that `auto` stands for."""
    try:
        return place == str(kv_folder())
    except Unusable:
        return False


def _without(config: EngineConfig) -> EngineConfig:
    alone = () if config.tiers is not None else OffloadSettings().of_tiers
    unused = {name: SETTINGS[name].default for name in alone}
    return config.replace(kv_offload_path=NO_DISK, kv_offload_disk_size=DISK_GIB, kv_disk_format="raw", **unused)


def _ruled_out(config: EngineConfig) -> str:
    """Which setting leaves no place for a tier; empty if none does."""
    others = {
        "offload_schedule": config.flat["offload_schedule"] != "off",
        "enable_prefix_caching": not config.cache.prefix_caching,
        "ranks on other hosts": not _on_this_host(config),
        "attention_backend triton": config.model.backend == "triton",
        "kv_remote_url": config.flat["kv_remote_url"] is not None,
    }
    return next((name for name, given in others.items() if given), "")


def _on_this_host(config: EngineConfig) -> bool:
    """Whether all ranks are known to run here. A home that several hosts share is no place for an index in SQLite."""
    by_torchrun = os.environ.get("LOCAL_WORLD_SIZE")
    if by_torchrun is not None:
        return int(by_torchrun) == config.ranks.count
    return config.ranks.count == 1 or config.ranks.launcher != "ray"


def _prepare(folder: Path) -> None:
    """Makes the directory, for the user alone. Raises Unusable."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.geteuid():
            raise Unusable(f"{from_home(folder)} belongs to another user")
        if stat.S_IMODE(found.st_mode) & 0o077:
            folder.chmod(0o700)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (FileExistsError, NotADirectoryError):
        raise Unusable(f"{from_home(folder)} is not a directory") from None
    except OSError as error:
        raise Unusable(f"nothing can be written to {from_home(folder)} ({error.strerror or error})") from None


def _room(folder: Path, asked: float) -> float:
    """GiB that KV may take there: what was asked for, or by default what SHARE of the free room allows, to a tenth.
    Raises Unusable if that is too little."""
    if asked != DISK_GIB:
        return asked
    free = (shutil.disk_usage(folder).free + _stored(folder / INDEX)) / GIB
    size = min(asked, int(SHARE * free * 10) / 10)
    if size < LEAST_GIB:
        raise Unusable(f"{SHARE:.0%} of what is free at {from_home(folder)} is less than {LEAST_GIB:g} GiB")
    return size


def _stored(index: Path) -> int:
    """Bytes of KV that are there already."""
    if not index.is_file():
        return 0
    from headrace.offload.tiers.index import stored_bytes  # SQLite, which few starts of a command need

    return stored_bytes(index)
