"""Variables of the environment that are meant for Headrace, and those that nothing reads."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from headrace.config.fields import ENV_PREFIX
from headrace.config.together import SETTINGS
from headrace.types import did_you_mean

log = logging.getLogger(__name__)

CACHE_DIR = "HEADRACE_CACHE_DIR"

OTHERS = frozenset({
    CACHE_DIR, "HEADRACE_DEBUG", "HEADRACE_ISA", "HEADRACE_ISA_BUILD", "HEADRACE_RANK_SECRET",
    "HEADRACE_TEST_SEED",
})  # fmt: skip
"""Variables that are no settings of an engine."""

_warned: set[str] = set()


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Those that nothing reads, each with what was meant, as did_you_mean tells it; may be empty."""
    known = OTHERS | {item.env for item in SETTINGS.values()}
    given = sorted(name for name in environ if name.startswith(ENV_PREFIX) and name not in known)
    ends = sorted(name.removeprefix(ENV_PREFIX) for name in known)  # they alone tell which one is near
    meant = {name: did_you_mean(name.removeprefix(ENV_PREFIX), ends) for name in given}
    return {name: told.replace("mean ", f"mean {ENV_PREFIX}") for name, told in meant.items()}


def warn_of_unknown() -> None:
    """Logs those of this process's environment, once each."""
    for name, meant in unknown_variables(os.environ).items():
        if name not in _warned:
            _warned.add(name)
            log.warning("%s is no setting, and nothing reads it%s", name, meant)


def cache_folder() -> Path:
    """HEADRACE_CACHE_DIR, else headrace in the user's cache directory (XDG_CACHE_HOME, by default ~/.cache). Raises
    RuntimeError for a user without a home."""
    if given := os.environ.get(CACHE_DIR):
        return Path(given).expanduser()
    user = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(user) if Path(user).is_absolute() else Path.home() / ".cache") / "headrace"  # others are invalid (XDG)


def from_home(place: Path) -> str:
    """A path as people read it: ~/.cache/headrace in place of /home/name/.cache/headrace."""
    shown, home = str(place), os.path.expanduser("~")
    return "~" + shown.removeprefix(home) if home != "/" and shown.startswith(home + os.sep) else shown
