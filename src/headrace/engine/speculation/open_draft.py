"""Loads the draft model of the settings, with memory for its keys and values behind the slots of the pool."""

from __future__ import annotations

import logging

from headrace.config import EngineConfig
from headrace.engine.draft_facts import DraftFacts
from headrace.engine.runner import Runner
from headrace.engine.speculation.draft_model import DraftModel
from headrace.engine.tokenizer import Tokenizer
from headrace.kernels import dispatch
from headrace.kv.storage import KVStorage
from headrace.models.decoder import load_decoder
from headrace.progress import LoadPhase, OnPhase, measured

log = logging.getLogger(__name__)

WEIGHTS = "weights of the draft model"


def open_draft(
    config: EngineConfig, tokenizer: Tokenizer | None, slots: int, weight_bytes: int, again: bool, tell: OnPhase
) -> DraftModel | None:
    """None where no model drafts. tokenizer, weight_bytes: of the model; slots: of the pool; again: see DraftModel.

    Raises ValueError, or UnsupportedModel, for a model that cannot draft here.
    """
    draft = DraftFacts.of(config)
    if draft is None:
        return None
    tell(LoadPhase(WEIGHTS))
    _check_tokens(draft, tokenizer)
    if draft.weight_bytes > weight_bytes:
        log.warning("speculative %s: the draft model is larger than the model; it will hardly pay", draft.name)
    told = measured(tell, WEIGHTS)
    decoder = load_decoder(draft.folder, config.model.dtype, told, draft.quantization)
    spec = decoder.config.attention
    capped = spec.score_cap is not None or spec.sinks
    largest = max(dim for _, dim in spec.every_shape)
    backend = dispatch.choose(config.model.backend, decoder.dtype, "cpu", largest, capped)
    storage = KVStorage(spec, slots, decoder.dtype)
    if config.cache.prefault:
        storage.prefault()
    log.info("drafts come from %s, which takes %s bytes a token of the pool", draft.name, draft.kv_bytes_per_token)
    cost = min(1.0, draft.weight_bytes / max(1, weight_bytes))
    return DraftModel(Runner(decoder, storage, backend), decoder.config.max_model_len, cost, again)


def _check_tokens(draft: DraftFacts, tokenizer: Tokenizer | None) -> None:
    """Raises ValueError where a token stands for another text in the draft model."""
    own = Tokenizer.load(draft.folder)
    if own is not None and tokenizer is not None and own.vocabulary != tokenizer.vocabulary:
        raise ValueError(
            f"speculative {draft.name}: its tokenizer has other tokens than the model's; take a smaller model of the "
            f"model's own family"
        )
