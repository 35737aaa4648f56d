"""Names of models on the hub, ORG/NAME or ORG/NAME:QUANT, and the GGUF files that QUANT chooses. Imports no torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from headrace.models.gguf.header import PART, SUFFIX
from headrace.types import did_you_mean

HUB_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<quant>[\w.-]+))?", re.ASCII)
USUAL_QUANT = "Q4_K_M"
"""What is taken of several where none is asked for, as llama.cpp does."""
NO_MODELS = ("mmproj", "imatrix")
"""In names of GGUF files that hold something else: what reads images, and statistics."""
FORMAT = r"I?Q\d+(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|NVFP4|BF16|F16|F32"
QUANT = re.compile(rf"(?:^|[-._])((?:UD-)?(?:{FORMAT}))$", re.IGNORECASE)
"""The format at the end of a file's name."""


@dataclass(frozen=True, slots=True)
class HubName:
    """ORG/NAME, and of several GGUF models there the one asked for."""

    repo: str
    quant: str | None = None


def hub_name(text: str) -> HubName | None:
    """The name in a text; None where it is none."""
    found = HUB_NAME.fullmatch(text)
    return HubName(found["repo"], found["quant"]) if found else None


def quants(files: Iterable[str]) -> dict[str, list[str]]:
    """What the GGUF models among the files are called by, and the parts of each in order: by their format; by their
    own name where they name none, or share it with another."""
    parts: dict[str, list[str]] = {}
    for file in sorted(files):
        name = PurePosixPath(file).name.lower()
        if name.endswith(SUFFIX) and not any(word in name for word in NO_MODELS):
            parts.setdefault(_stem(file), []).append(file)
    named = {stem: found[1].upper() if (found := QUANT.search(stem)) else "" for stem in parts}
    several = Counter(named.values())
    return {
        named[stem] if named[stem] and several[named[stem]] == 1 else PurePosixPath(stem).name: parts[stem]
        for stem in parts
    }


def _stem(file: str) -> str:
    """A model's file without its ending, and the number of its part."""
    path = PurePosixPath(file)
    part = PART.fullmatch(path.name)
    return str(path.with_name(part["stem"]) if part else path.with_suffix(""))


def chosen(models: dict[str, list[str]], wanted: str | None) -> str:
    """The key of the model that is wanted of `quants`; where nothing is said the only one, or the usual one. Raises
    ValueError that names them."""
    if wanted is None:
        usual = next(iter(models)) if len(models) == 1 else USUAL_QUANT
        if usual in models:
            return usual
        raise ValueError(f"there are several GGUF models; give one of them as NAME:QUANT: {_listed(models)}")
    by_name = {PurePosixPath(_stem(files[0])).name.lower(): quant for quant, files in models.items()}
    by_name |= {quant.lower(): quant for quant in models}
    if wanted.lower() in by_name:
        return by_name[wanted.lower()]
    if not models:
        raise ValueError("there is no GGUF file; leave the part behind the colon out")
    raise ValueError(f"there is no {wanted}{did_you_mean(wanted, models)}; there are: {_listed(models)}")


def _listed(models: Iterable[str]) -> str:
    return ", ".join(sorted(models))
