"""What may be wrong with a request or an engine, by kind; every room raises these."""

from __future__ import annotations


class InvalidRequest(ValueError):
    """A request that cannot be served as asked. `param` names the offending parameter (None: the whole request),
    `code` the kind of the fault as OpenAI's API does, where it has a name of its own ('context_length_exceeded')."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


class Overloaded(RuntimeError):
    """The waiting queue is full; try again after `retry_after_s` seconds (HTTP 429 with Retry-After)."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDead(RuntimeError):
    """The engine has failed and answers nothing any more; the message says why."""


class UnsupportedModel(ValueError):
    """The model folder asks for something Headrace does not implement; the message names it."""
