"""Where a model is, and what to do where it is not: names of the hub, files instead of folders, other formats."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path

from headrace.logs import shown

SHIPPED = {"tiny": Path(__file__).parent.parent / "assets" / "tiny"}
"""Models that come with the package, by name."""

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
FORM = "a folder in Hugging Face form: config.json, safetensors files, tokenizer.json"


def model_folder(model: str) -> Path:
    """The folder of a model: a shipped one by name, else a path. Raises ValueError if there is none."""
    folder = SHIPPED.get(model, Path(model).expanduser())
    try:
        if (folder / "config.json").is_file():
            return folder
        raise ValueError(f"model {shown(repr(model))}: {_why(model, folder)}")
    except OSError as error:
        raise ValueError(f"model {shown(repr(model))}: {error.strerror or error}") from None


def _why(model: str, folder: Path) -> str:
    """Why this is no model's folder, and what to give instead."""
    if folder.is_dir():
        return _folder_without_config(folder)
    if folder.suffix == ".gguf":
        return f"GGUF files are not read; download the original model, {FORM}"
    if folder.exists():
        return f"this is a file; give its folder, {folder.parent}"
    if HUB_NAME.fullmatch(model):
        return _of_the_hub(model)
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
    if any(folder.glob("*.gguf")):
        return f"the folder holds GGUF files, which are not read; download the original model, {FORM}"
    if (folder / "adapter_config.json").is_file():
        return "the folder holds an adapter (LoRA), not a model; merge it into its model, and give that folder"
    return f"the folder has no config.json; what is needed is {FORM}"


def _of_the_hub(name: str) -> str:
    """For a name of the hub: where it has been downloaded to already, or how to."""
    stored = hub_cache() / f"models--{name.replace('/', '--')}"
    found = sorted(stored.glob("snapshots/*/config.json"), key=lambda path: path.stat().st_mtime)
    if found:
        return f"names of the hub are not looked up; it has been downloaded before: give {found[-1].parent}"
    target = name.partition("/")[2]
    return (
        f"no folder with a config.json, and names of the hub are not looked up; "
        f"`hf download {name} --local-dir {target}` gets it: then give {target}"
    )


def hub_cache() -> Path:
    """Where Hugging Face's tools keep what they have downloaded."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
