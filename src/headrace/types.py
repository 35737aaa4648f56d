"""Records that every room speaks: chunk constants, sampling parameters, requests and their outputs.

Imports no torch, so that the tree, the plan and the scheduler can be tested without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

CHUNK = 64
"""Tokens in a chunk: the unit of sharing, of storage and of the canonical merge (DESIGN, section 3)."""

BLOCK_CHUNKS = 32
"""Chunks in a block: states are merged chunk by chunk inside a block, then block by block."""

FinishReason = Literal["stop", "length", "abort"]


class InvalidRequest(ValueError):
    """A request that cannot be served as asked. `param` names the offending parameter (None: the whole request)."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Overloaded(RuntimeError):
    """The waiting queue is full; try again after `retry_after_s` seconds (HTTP 429 with Retry-After)."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDead(RuntimeError):
    """The engine has failed and answers nothing any more; the message says why."""


class UnsupportedModel(ValueError):
    """The model folder asks for something Headrace does not implement; the message names it."""


def chunks_for(tokens: int) -> int:
    """Number of chunks that hold `tokens` tokens."""
    return -(-tokens // CHUNK)


MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_LISTED = 1024
"""Entries of stop_token_ids and of logit_bias, which every step looks at."""
MAX_SALT = 1024


def _number(name: str, value: Any, low: float, high: float, *, integer: bool = False) -> None:
    """Raises InvalidRequest unless low <= value <= high, naming `name`; booleans and NaN are refused."""
    kinds = (int,) if integer else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise InvalidRequest(
            f"{name} must be {'an integer' if integer else 'a number'}, got {type(value).__name__}", name
        )
    if not low <= value <= high:  # NaN too
        told = repr(value) if abs(value) < 2**64 or isinstance(value, float) else "a larger integer"
        raise InvalidRequest(f"{name} must be between {low} and {high}, got {told}", name)


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    if value is not None and not isinstance(value, list | tuple):
        raise InvalidRequest(f"{name} must be a list, got {type(value).__name__}", name)
    return tuple(value or ())


def check_sharing(cache_salt: Any, public_prefix_tokens: Any) -> None:
    """Raises InvalidRequest unless these can name what a request shares."""
    if cache_salt is not None:
        if not isinstance(cache_salt, str):
            raise InvalidRequest(f"cache_salt must be a string, got {type(cache_salt).__name__}", "cache_salt")
        if not 0 < len(cache_salt) <= MAX_SALT:
            told = f"cache_salt must have 1 to {MAX_SALT} characters; leave it out to share the cache"
            raise InvalidRequest(told, "cache_salt")
    _number("public_prefix_tokens", public_prefix_tokens, 0, 2**31, integer=True)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when generation ends.

    temperature 0 is greedy. top_k 0 (or -1) and top_p 1 are off. `seed` makes a request repeatable by itself: a draw
    depends on (seed, index of the sequence in the request, position) only, never on what else runs. `stop` strings end
    the text and are left out of it unless include_stop_str_in_output. `logprobs` is the number of alternatives to
    report per token (0: the chosen one alone; None: nothing); likewise `prompt_logprobs`. `min_tokens` forbids
    end-of-sequence and stops before that many tokens. max_tokens None means as many as the context allows.

    Raises InvalidRequest (a ValueError with `.param`) for anything out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else _listed("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _listed("stop_token_ids", self.stop_token_ids))
        if not isinstance(self.logit_bias, dict | None):
            raise InvalidRequest(f"logit_bias must be a dict, got {type(self.logit_bias).__name__}", "logit_bias")
        self._check_numbers()
        self._check_lists()

    def _check_numbers(self) -> None:
        _number("n", self.n, 1, MAX_N, integer=True)
        _number("temperature", self.temperature, 0, 100)
        _number("top_k", self.top_k, -1, 2**31, integer=True)
        _number("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise InvalidRequest("top_p must be above 0; for greedy decoding set temperature=0", "top_p")
        _number("min_p", self.min_p, 0, 1)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _number("repetition_penalty", self.repetition_penalty, 1e-3, 100)
        _number("min_tokens", self.min_tokens, 0, 2**31, integer=True)
        for name, high in (("logprobs", MAX_LOGPROBS), ("prompt_logprobs", MAX_LOGPROBS)):
            if getattr(self, name) is not None:
                _number(name, getattr(self, name), 0, high, integer=True)
        if self.seed is not None:
            _number("seed", self.seed, -(2**63), 2**63 - 1, integer=True)
        if self.max_tokens is not None:
            _number("max_tokens", self.max_tokens, 1, 2**31, integer=True)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}", "min_tokens")

    def _check_lists(self) -> None:
        if len(self.stop) > MAX_STOPS:
            raise InvalidRequest(f"at most {MAX_STOPS} stop strings, got {len(self.stop)}", "stop")
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LENGTH:
                raise InvalidRequest(f"stop strings must have 1 to {MAX_STOP_LENGTH} characters", "stop")
        for name, given in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias or {})):
            if len(given) > MAX_LISTED:
                raise InvalidRequest(f"at most {MAX_LISTED} entries in {name}, got {len(given)}", name)
        for token in self.stop_token_ids:
            _number("stop_token_ids", token, 0, 2**31, integer=True)
        for token, bias in (self.logit_bias or {}).items():
            _number("logit_bias", token, 0, 2**31, integer=True)
            _number("logit_bias", bias, -100, 100)

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequest where a token id named here does not exist in the vocabulary."""
        for name, ids in (("logit_bias", self.logit_bias or {}), ("stop_token_ids", self.stop_token_ids)):
            bad = [token for token in ids if token >= vocab_size]
            if bad:
                raise InvalidRequest(f"{name}: token id {bad[0]} is outside the vocabulary of {vocab_size}", name)


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of one token before temperature and filters; `rank` 1 is the most likely."""

    logprob: float
    rank: int
    text: str = ""


TokenLogprobs = dict[int, Logprob]
"""Token id -> Logprob at one position: the chosen token and the asked-for alternatives, most likely first."""


@dataclass(slots=True)
class Metrics:
    """What one request cost. Times in seconds; `cached_tokens` of the prompt came from the cache, unmultiplied by n.

    `strategy` names how several ranks computed the prompt, `strategy_reason` says why; both are empty with one rank.
    `restored_tokens` of the prompt came from a tier below the pool and count as cached too; `restore_reason` says what
    was loaded, projected and recomputed, and why so (empty where nothing was stored).
    """

    ttft_s: float = 0.0
    e2e_s: float = 0.0
    queue_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    strategy: str = ""
    strategy_reason: str = ""
    restored_tokens: int = 0
    restore_reason: str = ""


@dataclass(slots=True)
class Completion:
    """One of the n sequences of a request."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt. `text`, `token_ids`, `logprobs`, `finish_reason` are those of the first sequence."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[Completion]
    metrics: Metrics
    prompt: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason


@dataclass(slots=True)
class Request:
    """One prompt as the engine takes it: token ids, already checked against the vocabulary and the context length.

    `cache_salt` separates tenants: requests share cached chunks only with the same salt, except for the first
    `public_prefix_tokens` tokens (whole chunks of them), which all tenants share.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str | None = None
    public_prefix_tokens: int = 0
    arrival_s: float = 0.0

    def __post_init__(self) -> None:
        check_sharing(self.cache_salt, self.public_prefix_tokens)


@dataclass(slots=True)
class Delta:
    """What one step added to one sequence of a request; the concatenation of all deltas is the whole answer.

    `text` may lag behind `token_ids` while a character or a possible stop string is incomplete. `metrics` and, once,
    `prompt_logprobs` come with the delta that finishes the request's last sequence (metrics) or starts it.
    """

    request_id: str
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    metrics: Metrics | None = None


@dataclass(slots=True)
class TierStats:
    """Counters, and gauges (TIER_GAUGES). misses: blobs or parts that were expected and not had; bad: blobs found
    damaged or foreign; dropped: writes given up (no room, a full queue, a failure); queued_bytes wait to be written;
    degraded: the tier is left alone for a while after a failure, of which `reason` tells."""

    used_bytes: int = 0
    budget_bytes: int = 0
    blobs: int = 0
    reads: int = 0
    read_bytes: int = 0
    writes: int = 0
    written_bytes: int = 0
    misses: int = 0
    bad: int = 0
    dropped: int = 0
    evictions: int = 0
    errors: int = 0
    queued_bytes: int = 0
    degraded: bool = False
    reason: str = ""

    def after(self, earlier: TierStats) -> TierStats:
        """These gauges, and these counters on top of the earlier ones."""
        names = [f.name for f in fields(self) if f.name not in TIER_GAUGES]
        return replace(self, **{name: getattr(self, name) + getattr(earlier, name) for name in names})


TIER_GAUGES = ("used_bytes", "budget_bytes", "blobs", "queued_bytes", "degraded", "reason")
"""Fields of TierStats that tell how things stand; all others count."""


@dataclass(slots=True)
class EngineStats:
    """Counters and gauges of the engine, taken between steps. Counters only grow; times in seconds.

    `strategies` counts prefills by the strategy that several ranks computed them with. `restores` runs of stored chunks
    came back in restore_s: restored_tokens of them loaded, projected_tokens projected from stored activations,
    recomputed_tokens prefilled meanwhile; the link was at work for restore_link_s, and for restore_waited_s of that the
    engine waited; restore_failures gave up part of what they had begun to load.
    writeback_pending: chunks that wait to be stored, and blobs in the tiers' queues. `tiers`: of each tier by its kind
    (host, disk, remote).
    """

    running: int = 0
    waiting: int = 0
    kv_chunks_total: int = 0
    kv_chunks_used: int = 0
    kv_chunks_cached: int = 0
    kv_chunks_unshared: int = 0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    evictions: int = 0
    finished_stop: int = 0
    finished_length: int = 0
    finished_abort: int = 0
    steps: int = 0
    step_s: float = 0.0
    restores: int = 0
    restored_tokens: int = 0
    projected_tokens: int = 0
    recomputed_tokens: int = 0
    restore_s: float = 0.0
    restore_link_s: float = 0.0
    restore_waited_s: float = 0.0
    restore_failures: int = 0
    writeback_pending: int = 0
    strategies: dict[str, int] = field(default_factory=dict)
    tiers: dict[str, TierStats] = field(default_factory=dict)

    def after(self, earlier: EngineStats) -> EngineStats:
        """These gauges, and these counters on top of those of an engine that ended. Both records stay as they are."""
        names = [f.name for f in fields(self) if f.name not in (*STATS_GAUGES, *STATS_TABLES)]
        summed = {name: getattr(self, name) + getattr(earlier, name) for name in names}
        kinds = dict.fromkeys((*earlier.strategies, *self.strategies))
        strategies = {kind: earlier.strategies.get(kind, 0) + self.strategies.get(kind, 0) for kind in kinds}
        tiers = {kind: own.after(earlier.tiers.get(kind, TierStats())) for kind, own in self.tiers.items()}
        return replace(self, **summed, strategies=strategies, tiers=earlier.tiers | tiers)


STATS_GAUGES = (
    "running", "waiting", "kv_chunks_total", "kv_chunks_used", "kv_chunks_cached", "kv_chunks_unshared",
    "writeback_pending",
)  # fmt: skip
"""Fields of EngineStats that tell how things stand; all others count."""

STATS_TABLES = ("strategies", "tiers")
"""Fields of EngineStats that hold several counts."""


def field_names(kind: type) -> tuple[str, ...]:
    """Names of a dataclass's fields, in order."""
    return tuple(f.name for f in fields(kind))
