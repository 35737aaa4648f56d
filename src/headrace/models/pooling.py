"""How a checkpoint makes one vector of a text: sentence-transformers' modules.json and 1_Pooling. Imports no torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from headrace.files import read_given
from headrace.logs import shown
from headrace.models.files import MAX_JSON, is_gguf, read_json
from headrace.models.gguf.facts import FileFacts
from headrace.models.gguf.header import open_gguf, parts_of
from headrace.pooling import Pooling, PoolingKind

MODULES = "modules.json"
POOLING = "1_Pooling"
KINDS: dict[str, PoolingKind] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
OF_GGUF: dict[int, PoolingKind] = {0: "last", 1: "mean", 2: "cls", 3: "last"}
OTHERS = ("max", "mean_sqrt_len", "weightedmean")


def read_pooling(folder: Path) -> Pooling:
    """What the folder says, or the last token's state, normalised, where it says nothing. What it asks for and Headrace
    does not implement stands in `obstacle`, since only embeddings are the worse for it."""
    try:
        return _read(folder)
    except ValueError as error:
        return Pooling(obstacle=str(error))


def _read(folder: Path) -> Pooling:
    if is_gguf(folder):
        return Pooling(_kind_of_gguf(folder))
    sizes = _sizes(read_json(folder / "config.json"))
    if not (folder / MODULES).is_file():
        kind = _kind(folder / POOLING) if (folder / POOLING / "config.json").is_file() else "last"
        return Pooling(kind, True, sizes)
    modules = _modules(folder)
    kinds = [str(module.get("type", "")).rsplit(".", 1)[-1] for module in modules]
    unknown = next((kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")), None)
    if unknown is not None:
        raise ValueError(f"{MODULES} asks for {shown(unknown)}, which is not implemented")
    paths = [module.get("path") for module, kind in zip(modules, kinds, strict=True) if kind == "Pooling"]
    if len(paths) != 1:
        raise ValueError(f"{MODULES} has {len(paths)} modules for pooling; one is implemented")
    return Pooling(_kind(folder / _inside(paths[0])), "Normalize" in kinds, sizes)


def _kind_of_gguf(model: Path) -> PoolingKind:
    """By the key that llama.cpp pools by; 0, states of all tokens, asks for no one vector."""
    facts = FileFacts(open_gguf(parts_of(model)[0]))
    asked = facts.count("pooling_type", 0)
    if asked not in OF_GGUF:
        raise ValueError(f"{facts.prefix}pooling_type {asked} is not implemented; 1, 2 and 3 (mean, cls, last) are")
    return OF_GGUF[asked]


def _modules(folder: Path) -> list[dict[str, Any]]:
    try:
        value = json.loads(read_given(folder / MODULES, MAX_JSON))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{MODULES} cannot be read: {shown(error)}") from None
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ValueError(f"{MODULES} must hold a list of modules")
    return value


def _inside(path: Any) -> str:
    """A folder of the model folder."""
    if not isinstance(path, str) or not re.fullmatch(r"\w[\w.-]*/?", path):
        raise ValueError(f"{MODULES} names {shown(repr(path))}, which is no folder of the model")
    return path


def _kind(folder: Path) -> PoolingKind:
    told = read_json(folder / "config.json")
    named = told.get("pooling_mode")
    if isinstance(named, str):
        modes = [named]
    else:
        known = {"pooling_mode_lasttoken": "lasttoken", "pooling_mode_cls_token": "cls"}
        known |= {f"pooling_mode_{kind}_tokens": kind for kind in ("mean", *OTHERS)}
        modes = [kind for name, kind in known.items() if told.get(name)]
    if len(modes) != 1 or modes[0] not in KINDS:
        asked = " and ".join(map(shown, modes)) or "nothing"
        raise ValueError(f"{folder.name} asks for {asked}; last token, mean and cls are implemented, one at a time")
    return KINDS[modes[0]]


def _sizes(config: dict[str, Any]) -> tuple[int, ...] | None:
    """Sizes to which an embedding may be cut (Matryoshka); (): any; None: none."""
    listed = config.get("matryoshka_dimensions")
    if isinstance(listed, list) and all(type(size) is int and size > 0 for size in listed):
        return tuple(sorted(listed))
    return () if config.get("is_matryoshka") is True else None
