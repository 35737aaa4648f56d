"""Chat templates, rendered by processes of their own with limits of time, memory and output (`confined`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace.engine import template_worker as worker
from headrace.engine.confined import Closed, Confined, Died, Limits
from headrace.engine.template_worker import Status
from headrace.types import InvalidRequest

PROCESSES = 2
"""At most."""

WALL_S = 20.0

LIMITS = Limits(worker.__name__, worker.CPU_S, worker.MEMORY_BYTES, WALL_S, worker.MAX_OUTPUT + 1)


class Renderer:
    """The processes that render the templates of one tokenizer. Safe to share between threads."""

    def __init__(self) -> None:
        self._processes = Confined(LIMITS, PROCESSES)

    def warm(self) -> None:
        """Starts a process, so that the first request does not wait for its imports."""
        self._processes.warm()

    def render(
        self,
        template: str,
        messages: list[dict[str, Any]],
        tools: list[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The conversation as the template writes it.

        Raises InvalidRequest for whatever the template refuses, for a rendering beyond a limit, which it names, and for
        variables that are not JSON values.
        """
        given = {
            **variables,
            "messages": messages,
            "tools": tools,
            "chat_template": template,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            request = json.dumps(given).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"variables of a chat template must be JSON values: {error}", "messages") from None
        try:
            reply = self._processes.ask(request, bytes([Status.NO_MEMORY]))
        except Closed:
            raise InvalidRequest("the server is ending", "messages") from None
        except Died as died:
            raise _beyond(died.reason) from None
        status, text = Status(reply[0]), reply[1:].decode("utf-8", "surrogatepass")
        if status is Status.TEXT:
            return text
        if status is Status.REFUSED:
            raise InvalidRequest(f"the chat template refused the messages: {text}", "messages")
        if status is Status.TOO_LONG:
            raise _beyond(f"wrote more than {worker.MAX_OUTPUT >> 20} MiB")
        raise _beyond(f"took more than {worker.MEMORY_BYTES >> 20} MiB of memory")

    def close(self) -> None:
        """Ends the processes; renderings under way are refused, and so are later ones."""
        self._processes.close()


def _beyond(what: str) -> InvalidRequest:
    return InvalidRequest(f"the chat template {what} over these messages, which ended its rendering", "messages")
