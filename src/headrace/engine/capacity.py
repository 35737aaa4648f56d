"""What a loaded engine can hold and serve: small facts that both sides of a process boundary need. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from headrace.engine.adapters import Applied, ServedAdapter, started
from headrace.engine.folders import SHIPPED, model_folder
from headrace.pooling import Pooling
from headrace.types import CHUNK, MAX_REPORTED, InvalidRequest, SamplingParams

__all__ = ["SHIPPED", "Capacity", "check_variables", "flag", "model_folder"]

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""OpenAI's code for a prompt, or a prompt and its answer, beyond the context."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sizes in tokens unless named otherwise; `kernels` says which implementation each operation has, and why.

    `max_model_len`: the longest sequence, prompt and answer; `length_limit`: the setting that bounds it, empty where
    the model does; `model_len`: what the model itself takes.
    `embedding_size`: numbers of a hidden state; `pooling`: how embeddings are made of them.
    `writes`: whether the model has logits, and so answers and scores.
    `alike_tokens`: prompts up to this length have the same keys whatever their length; 0: all prompts.
    `fingerprint`: engines of which it is the same give the same bits (offload.identity.fingerprint).
    `adapters`: those that requests may ask for, by their numbers.
    `ranks`: the group of several ranks, its profile, and how strategies are chosen; empty for one rank.
    """

    model: str
    folder: str
    dtype: str
    quantization: str
    backend: str
    kv_cache_dtype: str
    kv_cache_tokens: int
    kv_bytes_per_token: int
    max_model_len: int
    max_sequences: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    kernels: dict[str, str] = field(default_factory=dict)
    context_parallel_size: int = 1
    tensor_parallel_size: int = 1
    ranks: str = ""
    experts: str = ""
    architecture: str = ""
    layers: int = 0
    model_len: int = 0
    length_limit: str = ""
    alike_tokens: int = 0
    embedding_size: int = 0
    pooling: Pooling = Pooling()
    writes: bool = True
    fingerprint: str = ""
    adapters: tuple[ServedAdapter, ...] = ()

    @property
    def told(self) -> str:
        """The model and its sizes in a few words."""
        weights = self.dtype if self.quantization == "none" else f"{self.dtype}, {self.quantization} weights"
        ranks = self.context_parallel_size * self.tensor_parallel_size
        several = f" on {ranks} ranks" if ranks > 1 else ""
        return f"{self.model!r}, {weights}, {self.kv_cache_tokens:,} KV tokens{several}"

    def check(self, prompt_token_ids: list[int], params: SamplingParams, embed: bool = False) -> SamplingParams:
        """Parameters with max_tokens resolved; with embed they have no say. Raises InvalidRequest naming what cannot be
        served."""
        if embed:
            self._check_embedded(prompt_token_ids)
            return params
        if not self.writes:
            made = "classifies texts" if self.pooling.labels else "makes embeddings"
            raise InvalidRequest(f"this model, {self.architecture}, has no head for text: it {made} alone", "model")
        count = len(prompt_token_ids)
        self._check_tokens(prompt_token_ids, 0 if params.max_tokens == 0 else 1)
        params.check_vocabulary(self.vocab_size)
        check_reported(count, params)
        room = self.max_model_len - count
        if params.max_tokens is None:
            resolved = replace(params, max_tokens=max(room, params.min_tokens))
            check_reported(count, resolved)
            return resolved
        if params.max_tokens > room:
            wanted, remedy = count + params.max_tokens, f"ask for at most {room:,}"
            raise InvalidRequest(
                f"max_tokens {params.max_tokens:,} after a prompt of {count:,} tokens; {self._limit(wanted, remedy)}",
                "max_tokens", CONTEXT_LENGTH_EXCEEDED,
            )  # fmt: skip
        return params

    def adapter_start(self, name: str, tokens: Sequence[int]) -> int:
        """From which token on a prompt has the adapter of that name; 0 without one. Raises InvalidRequest."""
        return started(self.adapters, name, tokens)

    def adapter_of(self, name: str) -> ServedAdapter | None:
        """The adapter of that name, if there is one."""
        return next((each for each in self.adapters if each.name == name), None)

    def applied(self, name: str, start: int) -> Applied | None:
        """The adapter of that name, from that position on; None for none."""
        return Applied([each.name for each in self.adapters].index(name), start) if name else None

    def adapter_mark(self, name: str, start: int) -> tuple[bytes, int] | None:
        """What stands for it in the names of chunks (ServedAdapter.mark)."""
        applied = self.applied(name, start)
        return None if applied is None else self.adapters[applied.number].mark(applied.start)

    def _check_embedded(self, token_ids: list[int]) -> None:
        if self.pooling.obstacle:
            raise InvalidRequest(f"this model has no embeddings: {self.pooling.obstacle}", "model")
        self._check_tokens(token_ids, 0)

    def _check_tokens(self, prompt_token_ids: list[int], answer: int) -> None:
        """answer: tokens that there must be room for."""
        count = len(prompt_token_ids)
        if not count:
            raise InvalidRequest("the prompt is empty: give at least one token", "prompt")
        if count + answer > self.max_model_len:
            raise InvalidRequest(
                f"the prompt has {count:,} tokens; {self._limit(count + answer, 'shorten the prompt')}",
                "prompt", CONTEXT_LENGTH_EXCEEDED,
            )  # fmt: skip
        if not (min(prompt_token_ids) >= 0 and max(prompt_token_ids) < self.vocab_size):
            bad = next(t for t in prompt_token_ids if not 0 <= t < self.vocab_size)
            raise InvalidRequest(f"token id {bad} is outside the vocabulary of {self.vocab_size}", "prompt")

    def _limit(self, wanted: int, remedy: str) -> str:
        """What bounds the context, and what lifts it for a sequence of `wanted` tokens, beside the remedy of the
        request's own."""
        told = f"the context is {self.max_model_len:,}, answer included"
        if not self.length_limit:
            return f"{told}, which is the model's own: {remedy}"
        if wanted > self.model_len:
            return f"{told}, bounded by {self.length_limit}, and the model's own is {self.model_len:,}: {remedy}"
        chunks = CHUNK * self.context_parallel_size
        least = {"max_model_len": wanted}
        if wanted > self.kv_cache_tokens:
            least["kv_cache_tokens"] = -(-wanted // chunks) * CHUNK
        names = [self.length_limit]
        if self.length_limit == "max_model_len" and wanted > self.kv_cache_tokens:
            names.append("kv_cache_tokens")
        flags = " and ".join(f"{flag(name)} {least[name]}" for name in names if name in least)
        lifts = f"start the engine with {flags}" if flags else f"raise {flag(self.length_limit)}"
        return f"{told}, bounded by {self.length_limit}: {remedy}, or {lifts}"


def check_reported(count: int, params: SamplingParams) -> None:
    """Raises InvalidRequest where log probabilities are asked for of positions beyond a prompt of `count` tokens, or of
    too many tokens at too many positions."""
    if params.prompt_logprobs_start > count:
        told = f"prompt_logprobs_start {params.prompt_logprobs_start:,} is beyond the prompt of {count:,} tokens"
        raise InvalidRequest(told, "prompt_logprobs_start")
    if not params.logprob_token_ids:
        return
    positions = 0 if params.prompt_logprobs is None else count - params.prompt_logprobs_start
    if params.reports_answer and params.max_tokens is not None:
        positions += params.n * params.max_tokens
    if positions * len(params.logprob_token_ids) > MAX_REPORTED:
        told = f"{len(params.logprob_token_ids):,} tokens at {positions:,} positions are more than {MAX_REPORTED:,}"
        raise InvalidRequest(f"logprob_token_ids: {told}; name fewer, or lower max_tokens", "logprob_token_ids")


def flag(name: str) -> str:
    """The option of a setting: kv_cache_tokens -> --kv-cache-tokens."""
    return "--" + name.replace("_", "-")


def check_variables(template: Iterable[str]) -> None:
    """Raises TypeError for a variable of a chat template that is a sampling parameter, which has no effect there."""
    wrong = next((name for name in template if name in SamplingParams.__dataclass_fields__), None)
    if wrong is not None:
        raise TypeError(f"{wrong} is a sampling parameter: give SamplingParams({wrong}=...)")
