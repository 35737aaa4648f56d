"""Which class computes the layers of a model, one operation at a time."""

from __future__ import annotations

from headrace.models.block_indexed import BlockIndexedLayer
from headrace.models.indexed import IndexedLayer
from headrace.models.latent import LatentLayer
from headrace.models.layers import Layer
from headrace.models.side_by_side import SideBySide
from headrace.models.spec import ModelConfig


def layer_kind(config: ModelConfig) -> type[Layer]:
    """That of layers which are alike but for what is recurrent in some (models.mixed_layers has others)."""
    if config.attention.index is not None:
        return BlockIndexedLayer if config.latent is None else IndexedLayer
    if config.side_by_side:
        return SideBySide
    return Layer if config.latent is None else LatentLayer
