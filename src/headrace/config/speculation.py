"""Settings of speculation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.config.fields import SettingsRecord, at_least, need, setting

MOST_TOKENS = 12
METHODS = ("off", "ngram", "suffix")
"""Values that are no model; a model of such a name is given as ./NAME."""


def _named(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} must be one of {', '.join(METHODS)}, or a model; got {value!r}")
    if value not in METHODS and value.strip().lower() in METHODS:
        raise ValueError(f"{name} {value!r}: write {value.strip().lower()}, or ./{value} for a model of that name")


@dataclass(frozen=True, slots=True)
class SpeculationSettings(SettingsRecord):
    """How tokens are drafted that are then verified, several in a step."""

    title: ClassVar[str] = "Speculation"

    method: str = setting(
        "off",
        "Draft tokens, and verify several in a step; answers are the same to the bit. off. ngram: what followed the "
        "same tokens earlier in prompt and answer. suffix: in earlier answers of the same tenant, too. These pay where "
        "answers repeat: quotes, edits of code, structured data. MODEL: a small model of the same vocabulary drafts, "
        "given as the model is.",
        name="speculative",
        check=_named,
    )
    tokens: int = setting(
        MOST_TOKENS,
        "Most tokens drafted for a sequence in one step. How many pay is measured.",
        name="num_speculative_tokens",
        check=at_least(1),
    )

    def check_together(self) -> None:
        need(self.tokens != MOST_TOKENS, self.on, "num_speculative_tokens", "drafts: set speculative")

    @property
    def on(self) -> bool:
        return self.method != "off"

    @property
    def model(self) -> str | None:
        """The model that drafts, as it was given."""
        return None if self.method in METHODS else self.method
