"""Loads the draft model of the settings, and gives it memory for keys and values behind the slots of the pool."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

from headrace.config import EngineConfig
from headrace.device import current
from headrace.engine.draft_facts import DraftFacts
from headrace.engine.gpu_memory import largest_step
from headrace.engine.ranks import device_of
from headrace.engine.runner import Runner
from headrace.engine.speculation.draft_model import DraftModel
from headrace.engine.tokenizer import Tokenizer
from headrace.kernels import dispatch
from headrace.kv.storage import KVStorage
from headrace.models.config import ModelConfig
from headrace.models.decoder import Decoder, load_decoder
from headrace.models.sizes import compute_type, weight_bytes
from headrace.offload.restore.timing import call_seconds
from headrace.parallel.threads import RankThreads
from headrace.progress import LoadPhase, OnPhase, measured
from headrace.types import CHUNK

log = logging.getLogger(__name__)

WEIGHTS = "weights of the draft model"
GPU_CATCH_UP = 2048
"""Tokens at most that a draft model on a GPU computes beside a step: such a pass is launched, which takes the host as
long for a few of them."""


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """Weights of a draft model. cost: see DraftModel."""

    config: EngineConfig
    facts: DraftFacts
    decoder: Decoder
    cost: float

    def open(
        self, slots: int, rows: int, again: bool, threads: RankThreads | None = None, timed: bool = False
    ) -> DraftModel:
        """With keys and values of its own in each of the pool's slots. rows: of the largest step in which all sequences
        decode; again, threads: see DraftModel. timed: it is measured now, for steps that wait for links, of which it is
        no part as its weights are. Raises ValueError where no backend computes it."""
        config, decoder = self.config, self.decoder
        spec = decoder.config.attention
        capped = spec.score_cap is not None or spec.sinks
        on_gpu, device = config.model.on_gpu, device_of(config)
        kind = current().type if on_gpu else "cpu"
        backend = dispatch.choose(config.model.backend, decoder.dtype, kind, spec.widest, capped)
        storage = KVStorage(spec, slots, decoder.dtype, device=device)
        if config.cache.prefault:
            storage.prefault()
        runner = Runner(decoder, storage, backend, decoding_rows=rows)
        if not on_gpu:
            seconds = _seconds(decoder, backend) if timed else None
            return DraftModel(runner, decoder.config.max_model_len, self.cost, again, threads=threads, seconds=seconds)
        runner.record()
        at_once = min(GPU_CATCH_UP, config.scheduler.max_batch_tokens)
        return DraftModel(runner, decoder.config.max_model_len, self.cost, again, at_once)


def _seconds(decoder: Decoder, backend: str) -> tuple[float, float]:
    """Of a pass over one row, and of a token of a prompt."""
    one, many = (call_seconds(partial(largest_step, decoder, backend, rows, 1)) for rows in (1, CHUNK))
    return one, many / CHUNK


def load_draft(
    config: EngineConfig, model: ModelConfig, tokenizer: Tokenizer | None, tell: OnPhase
) -> LoadedDraft | None:
    """None where no model drafts. model, tokenizer: of the model itself. Raises ValueError, or UnsupportedModel, for a
    model that cannot draft here."""
    draft = DraftFacts.of(config)
    if draft is None:
        return None
    tell(LoadPhase(WEIGHTS))
    _check_tokens(draft, tokenizer)
    asked = config.model
    taken = weight_bytes(model, compute_type(model, asked.dtype), asked.quantization, on_gpu=asked.on_gpu)
    if draft.weight_bytes > taken:
        log.warning("speculative %s: the draft model is larger than the model; it will hardly pay", draft.name)
    told = measured(tell, WEIGHTS)
    decoder = load_decoder(draft.folder, asked.dtype, told, draft.quantization, device=device_of(config))
    log.info("drafts come from %s, which takes %s bytes a token of the pool", draft.name, draft.kv_bytes_per_token)
    return LoadedDraft(config, draft, decoder, min(1.0, draft.weight_bytes / max(1, taken)))


def _check_tokens(draft: DraftFacts, tokenizer: Tokenizer | None) -> None:
    """Raises ValueError where a token stands for another text in the draft model."""
    own = Tokenizer.load(draft.folder)
    if own is not None and tokenizer is not None and own.vocabulary != tokenizer.vocabulary:
        raise ValueError(
            f"speculative {draft.name}: its tokenizer has other tokens than the model's; take a smaller model of the "
            f"model's own family"
        )
