"""What Hugging Face's tools have downloaded: where it lies, and the model of a name of the hub. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from headrace.files import read_given
from headrace.models.gguf.header import SUFFIX
from headrace.models.hub_names import HubName, chosen, quants

MAX_REVISION = 1024
"""Bytes of a file that names one."""


def hub_cache() -> Path:
    """Where it lies."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def stored(repo: str) -> Path:
    """The folder of a repository, whether it is there or not."""
    return hub_cache() / f"models--{repo.replace('/', '--')}"


def revisions(repo: str) -> list[Path]:
    """Folders of its files: its main revision first, then the one that came last."""
    folder = stored(repo)
    main = folder / "refs" / "main"
    snapshots = sorted(folder.glob("snapshots/*"), key=lambda path: path.stat().st_mtime, reverse=True)
    if main.is_file():
        snapshots.insert(0, folder / "snapshots" / read_given(main, MAX_REVISION).decode(errors="replace").strip())
    return snapshots


def gguf_of_the_hub(name: HubName) -> Path | None:
    """The GGUF file of a name; None where nothing of it is here. Raises ValueError where there are several and none
    or another is asked for."""
    for folder in revisions(name.repo):
        models = quants(path.relative_to(folder).as_posix() for path in folder.rglob(f"*{SUFFIX}"))
        if models:
            return folder / models[chosen(models, name.quant)][0]
    return None
