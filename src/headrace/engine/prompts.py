"""Prompts as callers give them: texts and token ids, one or several; all else is refused before it is computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from headrace.types import InvalidRequest, SamplingParams

T = TypeVar("T")
Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
"""A conversation: {"role": "user", "content": "..."} and so on."""
Prompts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


def listed(prompts: Any, param: str) -> list[str | list[int]]:
    """One prompt or several, as several. Numbers alone are the token ids of one; arrays and tensors count as lists.

    Raises InvalidRequest naming `param` for what is neither a text nor token ids.
    """
    if isinstance(prompts, str):
        return [prompts]
    found = _elements(prompts, param)
    if found and all(isinstance(each, int) for each in found):
        return [token_ids(found, param)]
    return [each if isinstance(each, str) else token_ids(each, param) for each in found]


def token_ids(given: Any, param: str) -> list[int]:
    """The token ids of one prompt. Raises InvalidRequest naming `param` for anything but whole numbers."""
    found = _elements(given, param)
    for kind in dict.fromkeys(map(type, found)):
        if kind is not int:
            raise InvalidRequest(f"{param}: token ids must be integers, got {kind.__name__}", param)
    return found


def for_each(given: T | Sequence[T], prompts: Sequence[Any], param: str) -> list[T]:
    """One value for all prompts, or a list with one for each. Raises InvalidRequest for a list of another length."""
    if not isinstance(given, list | tuple):
        return [given] * len(prompts)  # type: ignore[list-item]
    if len(given) != len(prompts):
        raise InvalidRequest(f"{len(prompts)} prompts but {len(given)} in the list {param}", param)
    return list(given)


def params_of(given: Any, prompts: Sequence[Any]) -> list[SamplingParams]:
    """Of each prompt: one for all, a list with one for each, or None. Raises InvalidRequest for what is neither."""
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * len(prompts)
    found = list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(each, SamplingParams) for each in found):
        told = "sampling_params must be SamplingParams(...), or a list with one for each prompt"
        raise InvalidRequest(told, "sampling_params")
    if len(found) != len(prompts):
        raise InvalidRequest(f"{len(prompts)} prompts but {len(found)} sampling_params", "sampling_params")
    return found


def one_params(given: Any) -> SamplingParams:
    """Of one prompt; None: the defaults. Raises InvalidRequest."""
    if not isinstance(given, SamplingParams | None):
        raise InvalidRequest(f"params must be SamplingParams(...), got {type(given).__name__}", "params")
    return given or SamplingParams()


def conversation(messages: Any) -> list[Any]:
    """One, as a list. Raises InvalidRequest for what is none; its messages are looked at later."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise InvalidRequest("messages must be a list of {'role': ..., 'content': ...}", "messages")
    return list(messages)


def conversations(messages: Messages | Sequence[Messages]) -> Sequence[Messages]:
    """One or several as several. Raises InvalidRequest for what is neither."""
    several = isinstance(messages, list | tuple) and bool(messages) and not isinstance(messages[0], Mapping)
    found: Sequence[Any] = messages if several else [messages]
    for one in found:
        if not isinstance(one, list | tuple) or not all(isinstance(each, Mapping) for each in one):
            told = "messages must be a list of {'role': ..., 'content': ...}, or a list of such lists"
            raise InvalidRequest(told, "messages")
    return found


def _elements(given: Any, param: str) -> list[Any]:
    given = _plain(given)
    if isinstance(given, Mapping):
        told = "not a dict: of {'prompt': ...} or {'prompt_token_ids': ...} give what it holds"
    elif isinstance(given, str | bytes | bytearray) or not isinstance(given, Iterable):
        told = f"not {given!r:.40}"
    else:
        found = list(given)
        # A server asks while others wait: looking at each of 100,000 ids would take some 30 ms.
        return found if set(map(type, found)) <= {int, str} else [_plain(each) for each in found]
    raise InvalidRequest(f"{param}: give a text, token ids, or a list of such, {told}", param)


def _plain(given: Any) -> Any:
    """Lists and numbers of Python in place of arrays, tensors and theirs."""
    return given.tolist() if hasattr(given, "tolist") else given
