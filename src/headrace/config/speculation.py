"""Settings of speculation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from headrace.config.fields import SettingsRecord, at_least, setting


@dataclass(frozen=True, slots=True)
class SpeculationSettings(SettingsRecord):
    """How tokens are drafted that are then verified, several in a step."""

    title: ClassVar[str] = "Speculation"

    method: Literal["off", "ngram", "suffix"] = setting(
        "off",
        "Draft tokens, and verify several in a step; answers are the same to the bit. ngram: what followed the same "
        "tokens earlier in prompt and answer. suffix: in earlier answers of the same tenant, too. It pays where "
        "answers repeat: quotes, edits of code, structured data.",
        name="speculative",
    )
    tokens: int = setting(
        12,
        "Most tokens drafted for a sequence in one step. How many pay is measured.",
        name="num_speculative_tokens",
        check=at_least(1),
    )

    @property
    def on(self) -> bool:
        return self.method != "off"
