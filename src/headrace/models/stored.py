"""What a checkpoint's own quantisation is, from its files' headers and config.json. Imports no torch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from headrace.models.files import is_gguf, weight_files
from headrace.models.gguf.architectures import architecture_of
from headrace.models.gguf.facts import EMBED
from headrace.models.gguf.header import open_gguf, parts_of
from headrace.models.quantised import Scheme
from headrace.models.spec import StoredWeights


def stored_weights(model: Path, scheme: Scheme | None) -> StoredWeights | None:
    """None where weights are numbers. scheme: what config.json says of them. Raises ValueError for files that are
    missing."""
    if is_gguf(model):
        return _of_gguf(model)
    if scheme is None:
        return None
    return StoredWeights(
        sum(path.stat().st_size for path in weight_files(model)),
        tuple(each.name for each in (scheme, *scheme.others)),
        scheme,
    )


def has_tiled_values(model: Path) -> bool:
    """See ModelConfig.tiled_values. Raises as stored_weights."""
    return is_gguf(model) and architecture_of(open_gguf(parts_of(model)[0])).tiled


def is_multiplied(model: Path) -> bool:
    """See ModelConfig.multiplied. Raises as stored_weights."""
    return is_gguf(model) and architecture_of(open_gguf(parts_of(model)[0])).multiplied


def _of_gguf(model: Path) -> StoredWeights | None:
    infos = {name: info for part in parts_of(model) for name, info in open_gguf(part).tensors.items()}
    sizes = Counter[str]()
    for info in infos.values():
        if not info.type.plain:
            sizes[info.type.name] += info.size
    if not sizes:
        return None
    every, formats = sum(info.held for info in infos.values()), tuple(name for name, _ in sizes.most_common())
    embed = infos.get(EMBED)
    return StoredWeights(every, formats, table=0 if embed is None or embed.type.plain else embed.held)
