"""Which class computes the layers of a model, one operation at a time."""

from __future__ import annotations

import logging

from headrace.models.block_indexed import BlockIndexedLayer
from headrace.models.hyper import HyperIndexedLayer
from headrace.models.indexed import IndexedLayer
from headrace.models.latent import LatentLayer
from headrace.models.layers import Layer, OneByOne
from headrace.models.mixed_layers import MixedLayer, MixedLayers
from headrace.models.shards import Share
from headrace.models.side_by_side import SideBySide
from headrace.models.spec import ModelConfig

log = logging.getLogger(__name__)


def tell_why_not_whole(share: Share | None, reason: str | None) -> None:
    """Once, where several tensor ranks have shares of the layers."""
    if share is None or share.rank == 0:
        log.info("layers are computed one operation at a time: %s", reason)


def layer_kind(config: ModelConfig) -> type[Layer]:
    """That of a model's layers; some may be recurrent."""
    if config.value_norm:
        return MixedLayer
    if config.attention.index is not None:
        if config.hyper is not None:
            return HyperIndexedLayer
        return BlockIndexedLayer if config.latent is None else IndexedLayer
    if config.side_by_side:
        return SideBySide
    return Layer if config.latent is None else LatentLayer


def one_by_one(layers: list[Layer]) -> OneByOne:
    """Layers of a kind, called one after another."""
    mixed = [layer for layer in layers if isinstance(layer, MixedLayer)]
    return MixedLayers(mixed) if mixed else OneByOne(layers)
