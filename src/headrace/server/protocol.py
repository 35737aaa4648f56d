"""Request bodies: which fields exist, what they become, and a named refusal for everything else."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields
from types import UnionType
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, Field, ValidationError, WithJsonSchema, create_model, field_validator
from pydantic_core import PydanticCustomError

from headrace.server.errors import ApiError, invalid
from headrace.server.json_body import json_object
from headrace.server.shape_fields import ShapedBody
from headrace.server.strict import Strict as Strict
from headrace.types import MAX_PRIORITY, SamplingParams, check_sharing

IGNORED = {
    "metadata",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
"""OpenAI fields that change no answer here: accepted with any value, and not used (docs/api/common.md)."""

REFUSED = {
    "functions": "this older form is not supported; use tools and tool_choice",
    "function_call": "this older form is not supported; use tools and tool_choice",
    "audio": "audio is not supported",
    "web_search_options": "web search is not supported",
    "verbosity": "verbosity is not supported",
    "suffix": "a suffix (fill in the middle) is not supported",
    "chat_template": "templates come from the model folder, or from --chat-template; a request cannot bring one",
}
"""Fields known by name and refused unless null or one of HARMLESS."""

HARMLESS: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none",),
    "suffix": ("",),
    "verbosity": ("medium",),
}

SPECIAL = ("logit_bias", "max_tokens")
"""Sampling parameters of a body that need more than to be handed on."""


def _only_false(value: bool) -> bool:
    if value:
        raise PydanticCustomError("only_false", "only false is supported")
    return value


OnlyFalse = Annotated[bool, AfterValidator(_only_false), WithJsonSchema({"const": False})]
"""False and nothing else; Literal[False] takes 0 too."""


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: OnlyFalse | None = None


def _json_form(kind: Any) -> Any:
    """The type that JSON has for a sampling parameter's: lists for sequences, strings as keys."""
    own = next((arg for arg in get_args(kind) if arg is not type(None)), kind) if _is_union(kind) else kind
    if get_origin(own) is Sequence:
        own = list[get_args(own)[0]]  # type: ignore[misc]
    if get_origin(own) is dict:
        own = dict[str, get_args(own)[1]]  # type: ignore[misc]
    return own | None


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)


SAMPLING = {
    item.name: _json_form(get_type_hints(SamplingParams)[item.name])
    for item in fields(SamplingParams)
    if item.metadata["body"]
}
"""Sampling parameters that all bodies have, and their types there."""


class Body(Strict):
    """What every body has. ignored: fields accepted with any value, and not used; refused: fields known by name and
    refused, with the reason, unless null or one of harmless."""

    ignored: ClassVar[Set[str]] = IGNORED
    refused: ClassVar[Mapping[str, str]] = REFUSED
    harmless: ClassVar[Mapping[str, tuple[Any, ...]]] = HARMLESS

    model: str | None = None


Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]


class AskingBody(Body):
    """What every body has that asks the engine. `priority`: of the tenant's own requests lower ones are computed first;
    None: 0."""

    priority: Priority | None = None


class StreamedBody(AskingBody):
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def wants_progress(self) -> bool:
        """Whether a stream should tell how far the prompt is read."""
        return False


_FIELDS: Any = {name: (kind, None) for name, kind in SAMPLING.items()}
_Sampling: Any = create_model("_Sampling", __base__=StreamedBody, **_FIELDS)


class SampledBody(_Sampling, ShapedBody):
    cache_salt: str | None = None
    public_prefix_tokens: int | None = None
    return_token_ids: bool | None = None
    return_progress: bool | None = None

    @field_validator("stop", mode="before", json_schema_input_type=str | list[str] | None)
    @classmethod
    def _one_stop_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    def check_together(self) -> None:
        """Fields that are right alone and wrong together."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options needs stream=true", "stream_options")
        if self.return_progress and not self.stream:
            raise invalid("return_progress needs stream=true", "return_progress")
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs is not available with stream=true", "prompt_logprobs")
        check_sharing(self.cache_salt, self.public_prefix_tokens or 0)

    def sampling(self, **special: Any) -> SamplingParams:
        """Raises InvalidRequest for values out of range."""
        given = {name: getattr(self, name) for name in SAMPLING if name not in SPECIAL}
        given = {name: value for name, value in given.items() if value is not None}
        if self.logit_bias:
            given["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        params = SamplingParams(**given, structured=self.shape(), **special)
        if params.logprob_token_ids and params.logprobs is None and params.prompt_logprobs is None:
            raise invalid("logprob_token_ids needs logprobs, or prompt_logprobs", "logprob_token_ids")
        return params

    @property
    def wants_progress(self) -> bool:
        return bool(self.return_progress)

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionBody(SampledBody):
    prompt: Any = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None

    def to_params(self) -> SamplingParams:
        self.check_together()
        if self.best_of not in (None, self.n or 1):
            raise invalid("best_of is supported only where it equals n", "best_of")
        extra: dict[str, Any] = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            extra["prompt_logprobs"] = self.logprobs
        return self.sampling(logprobs=self.logprobs, **extra)

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt."""
        return prompts_of(self.prompt, "prompt")


def prompts_of(value: Any, name: str) -> list[str | list[int]]:
    """One entry per prompt. Raises for anything but text, token ids, or a list of either."""
    if value is None:
        raise invalid(f"{name} is required", name, "missing")
    many = isinstance(value, list) and bool(value) and not _is_ids(value)
    prompts = value if many else [value]
    for index, prompt in enumerate(prompts):
        if not (_is_ids(prompt) or isinstance(prompt, str)) or type(prompt) is not type(prompts[0]):
            told = f"{name} must be a string, a list of strings, a list of token ids or a list of such lists"
            raise invalid(told, name)
        if not prompt:
            raise invalid(f"{name}{f'[{index}]' * many} must not be empty", name)
    return prompts


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _token_id(key: str) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > 10:
        raise invalid(f"logit_bias: keys are token ids, got {key[:40]!r}", "logit_bias")
    return int(key)


B = TypeVar("B", bound=Body)


def parse_body(kind: type[B], raw: bytes) -> B:
    """The body as `kind`. Raises ApiError 400 naming the first field at fault."""
    fields = json_object(raw)
    for name, why in kind.refused.items():
        value = fields.pop(name, None)
        if value is not None and value not in kind.harmless.get(name, ()):
            raise invalid(f"{name}: {why}", name, "unsupported_parameter")
    kept = {name: value for name, value in fields.items() if name not in kind.ignored}
    try:
        return kind.model_validate(kept)
    except ValidationError as error:
        raise explain(error, kept) from None


LARGE = 64 << 10
"""Bytes of a body that is read on a thread of its own, so that other requests go on."""


async def read_body(kind: type[B], raw: bytes) -> B:
    """`parse_body`, beside other requests if it may take long."""
    if len(raw) < LARGE:
        return parse_body(kind, raw)
    return await asyncio.to_thread(parse_body, kind, raw)


def explain(error: ValidationError, fields: Any, where: str = "") -> ApiError:
    """The first fault, a wrong value before an unknown field: an image part should be told about its type. fields: what
    was checked; where: its path, if it was not the whole body; `param` then names the field in full."""
    faults = error.errors(include_url=False)
    fault = min(faults, key=lambda e: e["type"] == "extra_forbidden")
    loc = _untagged(fault["loc"], fields)
    path = _path((where, *loc) if where else loc)
    if fault["type"] in ("union_tag_invalid", "union_tag_not_found"):
        path += "." + fault["ctx"]["discriminator"].strip("'")
    param = path if where or fault["loc"][0] == "messages" else str(fault["loc"][0])
    if fault["type"] == "extra_forbidden":
        return invalid(f"unknown field {path!r}", param, "unknown_parameter")
    if fault["type"] in ("missing", "union_tag_not_found"):
        return invalid(f"{path} is required", param, "missing")
    if fault["type"] == "union_tag_invalid":
        told = f"{fault['ctx']['tag'][:100]!r} is not supported here; possible: {fault['ctx']['expected_tags']}"
        return invalid(f"{path}: {told}", param, "unsupported_parameter")
    told = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "literal_error" and isinstance(fault["input"], str):
        told = f"{fault['input'][:100]!r} is not supported here; possible: {fault['ctx']['expected']}"
    return invalid(f"{path}: {told}", param, "invalid_type" if "type" in fault["type"] else None)


UNION_TAGS = ("a function", "a namespace")
"""Names of a union's members that are no value of a field."""
TYPES = ("dict[str,any]", "list[any]")
"""Others of them, which stand last."""


def _untagged(loc: tuple[int | str, ...], value: Any) -> tuple[int | str, ...]:
    """Without pydantic's names of a union's members, which stand behind the place of an object with a type or role. The
    last part is the field at fault. An object under the name of the type is a field: a function's `function`."""
    out: list[int | str] = []
    for place, part in enumerate(loc):
        if out and ((place < len(loc) - 1 and part in UNION_TAGS) or part in TYPES):
            continue
        tagged = out and place < len(loc) - 1 and isinstance(value, dict)
        if tagged and part in (value.get("type"), value.get("role")) and not _is_field(value, part, loc[place + 1]):
            value = {name: held for name, held in value.items() if name not in ("type", "role")}
            continue
        out.append(part)
        if isinstance(value, dict):
            value = value.get(part) if isinstance(part, str) else None
        else:
            value = value[part] if isinstance(value, list) and isinstance(part, int) and part < len(value) else None
    return tuple(out)


def _is_field(value: dict[str, Any], part: int | str, after: int | str) -> bool:
    return isinstance(part, str) and isinstance(value.get(part), dict) and after != part


def _path(loc: tuple[int | str, ...]) -> str:
    """('messages', 0, 'role') -> 'messages[0].role'."""
    out = ""
    for part in loc:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else part
    return out
