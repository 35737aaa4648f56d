"""Variables of the environment that are meant for Headrace: what they say, and which of them nothing reads."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.config import SETTINGS
from headrace.config.fields import ENV_PREFIX
from headrace.types import did_you_mean

OTHERS = {
    "HEADRACE_CACHE_DIR", "HEADRACE_DEBUG", "HEADRACE_ISA", "HEADRACE_ISA_BUILD", "HEADRACE_RANK_SECRET",
    "HEADRACE_TEST_SEED",
}  # fmt: skip
"""Variables that are no settings of an engine."""

UNKNOWN = "UNKNOWN, and read by nothing"


def findings(environ: Mapping[str, str]) -> dict[str, str]:
    """Variable -> its value. Values that are secret, or may hold a password, are not shown."""
    given = {name: text for name, text in sorted(environ.items()) if name.startswith(ENV_PREFIX)}
    return {name: _shown(name, text) for name, text in given.items()} or {"variables": "none: every setting by default"}


def _shown(name: str, text: str) -> str:
    setting = next((item for item in SETTINGS.values() if item.env == name), None)
    if setting is None and name not in OTHERS:
        return UNKNOWN + did_you_mean(name, [*(item.env for item in SETTINGS.values()), *OTHERS])
    hidden = "SECRET" in name or "URL" in name or (setting is not None and setting.secret)
    return "set" if hidden else text
