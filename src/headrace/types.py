"""Records that every room speaks: chunk constants, sampling parameters, requests and their outputs.

Imports no torch, so that the tree, the plan and the scheduler can be tested without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from functools import wraps
from typing import Any, Literal

from headrace.errors import EngineDead as EngineDead
from headrace.errors import InvalidRequest as InvalidRequest
from headrace.errors import Overloaded as Overloaded
from headrace.errors import UnsupportedModel as UnsupportedModel
from headrace.structured import Structured as Structured
from headrace.texts import check_text

CHUNK = 64
"""Tokens in a chunk: the unit of sharing, of storage and of the canonical merge (docs/attention.md)."""

BLOCK_CHUNKS = 32
"""Chunks in a block: states are merged chunk by chunk inside a block, then block by block."""

FinishReason = Literal["stop", "length", "abort"]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """'; did you mean KNOWN?' if a known name is like this one, else nothing."""
    near = get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


MOST_SHOWN = 60
"""Characters of a text in a repr."""


def shortened(text: str) -> str:
    """Its repr, cut in the middle of a text that is long."""
    half = MOST_SHOWN // 2
    return repr(text if len(text) <= MOST_SHOWN else f"{text[:half]} ... {text[-half:]}")


def set_apart(record: Any) -> str:
    """The repr of a dataclass, with the fields alone that are not as by default."""
    usual = {
        item.name: item.default if item.default_factory is MISSING else item.default_factory()
        for item in fields(record)
    }
    values = {name: getattr(record, name) for name in usual}
    told = [f"{name}={value!r}" for name, value in values.items() if usual[name] is MISSING or value != usual[name]]
    return f"{type(record).__name__}({', '.join(told)})"


def chunks_for(tokens: int) -> int:
    """Number of chunks that hold `tokens` tokens."""
    return -(-tokens // CHUNK)


MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_LISTED = 1024
"""Entries of stop_token_ids and of logit_bias, which every step looks at, and of logprob_token_ids."""
MAX_REPORTED = 1 << 20
"""Log probabilities that one request may ask for by logprob_token_ids: tokens named times positions."""
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
        check_text(cache_salt, "cache_salt")
        if not 0 < len(cache_salt) <= MAX_SALT:
            told = f"cache_salt must have 1 to {MAX_SALT} characters; leave it out to share the cache"
            raise InvalidRequest(told, "cache_salt")
    _number("public_prefix_tokens", public_prefix_tokens, 0, 2**31, integer=True)


MAX_TENANT = 256
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
MAX_PRIORITY = 2**31 - 1


def check_turn(tenant: Any, weight: Any, priority: Any) -> None:
    """Raises InvalidRequest unless these can say when a request has its turn."""
    if not isinstance(tenant, str) or len(tenant) > MAX_TENANT:
        raise InvalidRequest(f"tenant must be a string of at most {MAX_TENANT} characters", "tenant")
    check_text(tenant, "tenant")
    _number("weight", weight, MIN_WEIGHT, MAX_WEIGHT)
    _number("priority", priority, -MAX_PRIORITY, MAX_PRIORITY, integer=True)


def _option(
    default: Any, low: float | None = None, high: float | None = None, *, cli: str = "", body: bool = True
) -> Any:
    """A request option. `low` and `high` bound a number, both included; `cli` is its help on the command line (empty:
    not there). `body`: request bodies have it under its name, in JSON's form of its type; protocol.py makes them so."""
    bounds = () if low is None else ((low, high),)
    return field(default=default, metadata={"range": bounds, "cli": cli, "body": body})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when generation ends.

    - `n`: sequences for the prompt, each drawn by itself.
    - `temperature`: 0 takes the most likely token (greedy), 1 draws as the model says, more is more varied.
    - `top_k`, `top_p`, `min_p`: draw from so many most likely tokens (0 or -1: all), from those that have this
      probability together, and from none less likely than this share of the most likely one.
    - `seed` makes a request repeatable by itself: a draw depends on (seed, index of the sequence in the request,
      position) only, never on what else runs.
    - `presence_penalty`, `frequency_penalty`: against tokens of the answer, once or by how often they were used;
      `repetition_penalty`: above 1 against those of the prompt, too.
    - `logit_bias`: token id -> what is added to its logit.
    - `logprobs`, `prompt_logprobs`: alternatives to report for each token (0: the chosen one alone; None: nothing).
      `prompt_logprobs_start`: the first position of the prompt that is reported; the text before it may come from the
      cache. `logprob_token_ids`: the alternatives to report, in place of the most likely ones, beside the chosen token;
      with neither of the two, at each token of the answer.
    - `stop`, `stop_token_ids`: texts and tokens that end the answer. A stop text is left out of it unless
      `include_stop_str_in_output`.
    - `max_tokens`, `min_tokens`: most tokens (None: as many as the context allows; 0, with prompt_logprobs: the prompt
      is scored, and nothing is drawn); no end before so many.
    - `ignore_eos`: go on past the end-of-text token. `skip_special_tokens`: leave special tokens out of the text.
    - `structured`: the shape that the answer must have, a Structured.

    Raises InvalidRequest (a ValueError with `.param`) for anything out of range.
    """

    # A new option is a field here and the place where it acts; HTTP and the command line follow.
    n: int = _option(1, 1, MAX_N)
    temperature: float = _option(1.0, 0, 100, cli="0 takes the most likely token; higher is more varied.")
    top_k: int = _option(0, -1, 2**31, cli="Draw from so many most likely tokens; 0: all.")
    top_p: float = _option(1.0, 0, 1, cli="Draw from the most likely tokens that have this probability together.")
    min_p: float = _option(0.0, 0, 1, cli="Leave out tokens less likely than this share of the most likely one.")
    seed: int | None = _option(None, -(2**63), 2**63 - 1)  # --seed is a setting of the engine already
    presence_penalty: float = _option(0.0, -2, 2, cli="Against tokens that were used already.")
    frequency_penalty: float = _option(0.0, -2, 2, cli="Against tokens by how often they were used.")
    repetition_penalty: float = _option(1.0, 1e-3, 100, cli="Against tokens of prompt and answer; 1: none.")
    logit_bias: dict[int, float] | None = _option(None)
    logprobs: int | None = _option(None, 0, MAX_LOGPROBS, body=False)
    prompt_logprobs: int | None = _option(None, 0, MAX_LOGPROBS)
    stop: Sequence[str] = _option((), cli="Text that ends the answer; may be given several times.")
    stop_token_ids: Sequence[int] = _option(())
    include_stop_str_in_output: bool = _option(False)
    max_tokens: int | None = _option(
        16, 0, 2**31, cli="Most tokens of an answer. Default: as many as the context allows."
    )
    min_tokens: int = _option(0, 0, 2**31, cli="Fewest tokens of an answer.")
    ignore_eos: bool = _option(False, cli="Go on past the end-of-text token.")
    skip_special_tokens: bool = _option(True)
    structured: Structured | None = _option(None, body=False)
    prompt_logprobs_start: int = _option(0, 0, 2**31)
    logprob_token_ids: Sequence[int] = _option(())

    def __repr__(self) -> str:
        return set_apart(self)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else _listed("stop", self.stop))
        for name in ("stop_token_ids", "logprob_token_ids"):
            object.__setattr__(self, name, _listed(name, getattr(self, name)))
        if not isinstance(self.logit_bias, dict | None):
            raise InvalidRequest(f"logit_bias must be a dict, got {type(self.logit_bias).__name__}", "logit_bias")
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false, got {getattr(self, name)!r}", name)
        if not isinstance(self.structured, Structured | None):
            raise InvalidRequest("structured must be a Structured: json, regex, choice, ...", "structured")
        self._check_numbers()
        self._check_lists()

    def _check_numbers(self) -> None:
        for name, low, high, integer, optional in RANGES:
            value = getattr(self, name)
            if value is not None or not optional:
                _number(name, value, low, high, integer=integer)
        if self.top_p == 0:
            raise InvalidRequest("top_p must be above 0; for greedy decoding set temperature=0", "top_p")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}", "min_tokens")
        if self.prompt_logprobs_start and self.prompt_logprobs is None:
            raise InvalidRequest("prompt_logprobs_start needs prompt_logprobs", "prompt_logprobs_start")
        if self.max_tokens == 0:
            self._check_scores()

    def _check_scores(self) -> None:
        if self.prompt_logprobs is None:
            told = "max_tokens must be 1 or more; 0 goes with prompt_logprobs (or logprobs and echo)"
            raise InvalidRequest(told, "max_tokens")
        if self.n > 1:
            raise InvalidRequest("with max_tokens 0 nothing is drawn: n must be 1", "n")

    def _check_lists(self) -> None:
        if len(self.stop) > MAX_STOPS:
            raise InvalidRequest(f"stop must have at most {MAX_STOPS} texts, got {len(self.stop)}", "stop")
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LENGTH:
                raise InvalidRequest(f"stop must have texts of 1 to {MAX_STOP_LENGTH} characters", "stop")
            check_text(text, "stop")
        for name in ("stop_token_ids", "logprob_token_ids", "logit_bias"):
            given = getattr(self, name) or ()
            if len(given) > MAX_LISTED:
                raise InvalidRequest(f"at most {MAX_LISTED} entries in {name}, got {len(given)}", name)
        for name in ("stop_token_ids", "logprob_token_ids"):
            for token in getattr(self, name):
                _number(name, token, 0, 2**31, integer=True)
        for token, bias in (self.logit_bias or {}).items():
            _number("logit_bias", token, 0, 2**31, integer=True)
            _number("logit_bias", bias, -100, 100)

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def reports_answer(self) -> bool:
        """Whether log probabilities of the answer's tokens are reported."""
        return self.logprobs is not None or (bool(self.logprob_token_ids) and self.prompt_logprobs is None)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequest where a token id named here does not exist in the vocabulary."""
        for name in ("logit_bias", "stop_token_ids", "logprob_token_ids"):
            bad = [token for token in getattr(self, name) or () if token >= vocab_size]
            if bad:
                raise InvalidRequest(f"{name}: token id {bad[0]} is outside the vocabulary of {vocab_size}", name)


def _suggesting(init: Any) -> Any:
    """Says which parameter was meant where there is none of that name."""

    @wraps(init)
    def checked(self: Any, *args: Any, **named: Any) -> None:
        known = self.__dataclass_fields__
        unknown = next((name for name in named if name not in known), None)
        if unknown is not None:
            raise TypeError(
                f"unknown parameter {unknown!r}{did_you_mean(unknown, known) or ': help(SamplingParams) lists them'}"
            )
        init(self, *args, **named)

    return checked


SamplingParams.__init__ = _suggesting(SamplingParams.__init__)  # type: ignore[method-assign]


RANGES = tuple(
    (item.name, low, high, str(item.type).startswith("int"), str(item.type).endswith("None"))
    for item in fields(SamplingParams)
    for low, high in item.metadata["range"]
)
"""(name, low, high, whether an integer, whether None too) of the numbers among the sampling parameters."""
FLAGS = tuple(item.name for item in fields(SamplingParams) if item.type == "bool")


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

    def __repr__(self) -> str:
        return set_apart(self)

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first over the time after it; None if that is no time."""
        decode_s = self.e2e_s - self.ttft_s
        return (self.output_tokens - 1) / decode_s if decode_s > 0 else None


@dataclass(slots=True)
class Request:
    """One prompt as the engine takes it: token ids, already checked against the vocabulary and the context length.

    `cache_salt` separates tenants: requests share cached chunks only with the same salt, except for the first
    `public_prefix_tokens` tokens (whole chunks of them), which all tenants share. `embed`: the prompt's embedding is
    wanted, and no answer.

    `tenant`: whose turns it takes, and `weight` the tenant's share of them beside other tenants'. `priority`: within
    the tenant, lower ones are computed first. None of the three changes what is answered (docs/fairness.md).
    `tenant`: whose its chunks are; `kv_share`: of the pool, that the tenant's chunks keep against all others;
    `kv_limit`: of the pool, that they take at most (docs/cache.md); `tier_quota`: of each tier, that they keep, in
    place of kv_tenant_quota (docs/offload.md).
    `adapter`: by name, of whom the tokens from the position `adapter_start` on are computed; "": of the model alone.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str | None = None
    public_prefix_tokens: int = 0
    arrival_s: float = 0.0
    embed: bool = False
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    kv_share: float = 0.0
    kv_limit: float = 1.0
    tier_quota: float | None = None
    adapter: str = ""
    adapter_start: int = 0

    def __repr__(self) -> str:
        """Without the tokens, and without the salt, which is as good as a tenant's name."""
        return f"Request({self.request_id!r}, {len(self.prompt_token_ids):,} tokens, {self.params!r})"

    def __post_init__(self) -> None:
        check_text(self.request_id, "request_id")
        if not isinstance(self.embed, bool):
            raise InvalidRequest(f"embed must be true or false, got {self.embed!r}", "embed")
        check_sharing(self.cache_salt, self.public_prefix_tokens)
        check_turn(self.tenant, self.weight, self.priority)
        for name in ("kv_share", "kv_limit", "tier_quota"):
            if name != "tier_quota" or self.tier_quota is not None:
                _number(name, getattr(self, name), 0, 1)
        if self.kv_limit == 0:
            raise InvalidRequest("kv_limit must be above 0; leave it out where there is none", "kv_limit")
        if self.kv_share > self.kv_limit:
            raise InvalidRequest(f"kv_share {self.kv_share:g} is above kv_limit {self.kv_limit:g}", "kv_share")


@dataclass(slots=True)
class Delta:
    """What one step added to one sequence of a request; the concatenation of all deltas is the whole answer.

    `text` may lag behind `token_ids` while a character or a possible stop string is incomplete. `metrics` and, once,
    `prompt_logprobs` come with the delta that finishes the request's last sequence (metrics) or starts it. `embedding`:
    of a request that embeds, fp32, little-endian, before it is cut and normalised. `cached_tokens`: of the prompt, with
    the first token of the request's first sequence; nobody hears the metrics of a request that is given up.
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
    embedding: bytes | None = None
    cached_tokens: int | None = None

    def __repr__(self) -> str:
        return set_apart(self)
