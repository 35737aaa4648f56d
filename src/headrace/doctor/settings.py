"""Variables of the environment that are meant for Headrace: what they say, and which of them nothing reads."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.config import SETTINGS
from headrace.config.environment import unknown_variables
from headrace.config.fields import ENV_PREFIX

UNKNOWN = "UNKNOWN, and read by nothing"


def findings(environ: Mapping[str, str]) -> dict[str, str]:
    """Variable -> its value. Values that are secret, or may hold a password, are not shown."""
    given = {name: text for name, text in sorted(environ.items()) if name.startswith(ENV_PREFIX)}
    unknown = {name: UNKNOWN + meant for name, meant in unknown_variables(environ).items()}
    shown = {name: unknown.get(name) or _shown(name, text) for name, text in given.items()}
    return shown or {"variables": "none: every setting by default"}


def _shown(name: str, text: str) -> str:
    setting = next((item for item in SETTINGS.values() if item.env == name), None)
    hidden = "SECRET" in name or "URL" in name or (setting is not None and setting.secret)
    return "set" if hidden else text
