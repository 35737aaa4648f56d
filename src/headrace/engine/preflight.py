"""What can be said of settings and a model before anything is started. Imports no torch: it takes a tenth of a second.

The engine checks again what it depends on. This is for people: they hear of a mistake at once, in one line.
"""

from __future__ import annotations

from headrace.config import EngineConfig
from headrace.engine.capacity import model_folder
from headrace.engine.footprint import Footprint
from headrace.models.files import weight_files
from headrace.models.plain_config import plain_config
from headrace.models.shards import Share
from headrace.models.spec import ModelConfig

_passed: set[str] = set()


def check(config: EngineConfig) -> None:
    """Raises ValueError, or UnsupportedModel, which says what is wrong and the remedy. What has passed in this process
    is not looked at again: an engine that is started anew finds other memory free than the first."""
    name = repr(sorted(config.flat.items()))
    if name in _passed:
        return
    folder = model_folder(config.model.folder)
    model = plain_config(folder)
    weight_files(folder)
    check_lengths(config, model)
    if config.ranks.tensor > 1:
        for rank in range(config.ranks.tensor):
            Share(model, rank, config.ranks.tensor)
    Footprint.of(config, model).check()
    _passed.add(name)


def check_lengths(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ValueError for a sequence longer than the model's, or than the KV cache holds."""
    asked, tokens = config.model.max_len, config.cache.tokens
    if asked is None:
        return
    if asked > model.max_model_len:
        raise ValueError(f"max_model_len {asked} exceeds the model's {model.max_model_len}: lower it, or leave it out")
    if tokens is not None and config.streaming is None and asked > tokens // 64 * 64 * config.ranks.context:
        raise ValueError(
            f"kv_cache_tokens {tokens} holds no sequence of max_model_len {asked}: raise the one or lower the other"
        )
