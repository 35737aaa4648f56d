"""Where a model is, and what to do where it is not: folders, GGUF files, names of the hub that were downloaded."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path

from headrace.files import read_given
from headrace.logs import shown
from headrace.models.gguf.header import PART, SUFFIX, parts_of

SHIPPED = {"tiny": Path(__file__).parent.parent / "assets" / "tiny"}
"""Models that come with the package, by name."""

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
FORM = "a folder in Hugging Face form (config.json, safetensors files, tokenizer.json) or a GGUF file"
MAX_REVISION = 1024
"""Bytes of a file that names one."""


def model_folder(model: str) -> Path:
    """The folder of a model, or its GGUF file: a shipped one by name, a path, or what Hugging Face's tools have
    downloaded under a name of the hub. Raises ValueError if there is none."""
    path = SHIPPED.get(model, Path(model).expanduser())
    try:
        found = _model_at(path)
        if found is None and not path.exists() and HUB_NAME.fullmatch(model):
            found = _of_the_hub(model)
        if found is not None:
            return found
        raise ValueError(f"model {shown(repr(model))}: {_why(model, path)}")
    except OSError as error:
        raise ValueError(f"model {shown(repr(model))}: {error.strerror or error}") from None


def _model_at(path: Path) -> Path | None:
    """A folder with a config.json, a GGUF file, or the one that a folder holds; of several parts the first."""
    if (path / "config.json").is_file():
        return path
    if path.is_file():
        return parts_of(path)[0] if path.suffix == SUFFIX else None
    models = _gguf_models(path)
    return models[0] if len(models) == 1 else None


def _gguf_models(folder: Path) -> list[Path]:
    """GGUF files of a folder, of those in parts the first."""
    found = sorted(folder.glob(f"*{SUFFIX}"))
    return [path for path in found if (part := PART.fullmatch(path.name)) is None or int(part["number"]) == 1]


def _why(model: str, folder: Path) -> str:
    """Why this is no model's folder, and what to give instead."""
    if folder.is_dir():
        return _folder_without_config(folder)
    if folder.exists():
        return f"this is a file; give its folder, {folder.parent}, or a GGUF file"
    if HUB_NAME.fullmatch(model):
        return (
            f"there is no such folder, and nothing of this name in {hub_cache()}: "
            f"`hf download {model}` fetches it, or give the folder where it is"
        )
    near = get_close_matches(model, SHIPPED, 1)
    meant = f"did you mean {near[0]}?" if near else f"give a path, or one of: {', '.join(SHIPPED)}"
    return f"no folder with a config.json; {meant}"


def _folder_without_config(folder: Path) -> str:
    snapshots = sorted(folder.glob("snapshots/*/config.json"), key=lambda path: path.stat().st_mtime)
    if snapshots:
        return f"no config.json here; give the folder {snapshots[-1].parent}"
    inside = sorted(folder.glob("*/config.json"))
    if len(inside) == 1:
        return f"no config.json here; give the folder {inside[0].parent}"
    models = _gguf_models(folder)
    if models:
        return f"the folder holds several GGUF files; give one of them: {', '.join(str(path) for path in models[:5])}"
    if (folder / "adapter_config.json").is_file():
        return "the folder holds an adapter (LoRA), not a model; give its model, and --lora-modules NAME=FOLDER"
    return f"the folder has no config.json; what is needed is {FORM}"


def hub_folder(name: str, file: str) -> Path | None:
    """What has been downloaded under a name of the hub, and holds such a file; None where nothing has."""
    if not HUB_NAME.fullmatch(name):
        return None
    return next((path for path in _revisions(name) if (path / file).is_file()), None)


def _of_the_hub(name: str) -> Path | None:
    """The model that has been downloaded under a name of the hub."""
    return next((found for path in _revisions(name) if (found := _model_at(path)) is not None), None)


def _revisions(name: str) -> list[Path]:
    """What has been downloaded under a name of the hub: its main revision first, then the one that came last."""
    stored = hub_cache() / f"models--{name.replace('/', '--')}"
    main = stored / "refs" / "main"
    snapshots = sorted(stored.glob("snapshots/*"), key=lambda path: path.stat().st_mtime, reverse=True)
    if main.is_file():
        snapshots.insert(0, stored / "snapshots" / read_given(main, MAX_REVISION).decode(errors="replace").strip())
    return snapshots


def hub_cache() -> Path:
    """Where Hugging Face's tools keep what they have downloaded."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
