"""A conversation: its messages, what they cost, and how it is written to a file."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.types import Metrics

Message = dict[str, str]


class Conversation:
    """The messages so far; a turn that was not answered leaves none.

    turns: those of this conversation, `all_turns` those of earlier ones too, as are the tokens.
    """

    def __init__(self, model: str, system: str | None = None) -> None:
        self.model = model
        self.all_turns = self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.last: Metrics | None = None
        self.begin(system)

    def begin(self, system: str | None) -> None:
        """A new conversation under this system prompt."""
        self.system = system
        self.messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    @property
    def turns(self) -> int:
        return sum(message["role"] == "user" for message in self.messages)

    def asking(self, text: str) -> list[Message]:
        """The messages with another of the user's, which is not kept yet."""
        return [*self.messages, {"role": "user", "content": text}]

    def answered(self, text: str, answer: str, metrics: Metrics | None) -> None:
        self.messages = [*self.asking(text), {"role": "assistant", "content": answer}]
        self.all_turns += 1
        if metrics is not None:
            self.prompt_tokens += metrics.prompt_tokens
            self.cached_tokens += metrics.cached_tokens
            self.output_tokens += metrics.output_tokens
            self.last = metrics

    def save(self, path: Path, *, replace: bool = False) -> None:
        """Writes Markdown (.md) or JSON (.json). Raises ValueError for another suffix and for a file that cannot be
        written, or is there already and not to be replaced."""
        if path.suffix not in (".md", ".json"):
            raise ValueError(f"{path}: the name must end in .md or .json")
        text = self.as_json() if path.suffix == ".json" else self.as_markdown()
        try:
            with path.open("w" if replace else "x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise ValueError(f"{path} exists: /save! {path} replaces it") from None
        except OSError as error:
            raise ValueError(f"cannot write {path}: {error.strerror}") from None

    def as_json(self) -> str:
        """The body of a chat request that would go on from here."""
        return json.dumps({"model": self.model, "messages": self.messages}, indent=1, ensure_ascii=False) + "\n"

    def as_markdown(self) -> str:
        parts = [f"# Chat with {self.model}"]
        for message in self.messages:
            parts += [f"## {message['role'].capitalize()}", message["content"]]
        return "\n\n".join(parts) + "\n"
