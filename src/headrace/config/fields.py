"""How a setting is declared: as a field of its room's record, which names it for users and checks it."""

from __future__ import annotations

import logging
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from os import PathLike, fspath
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from headrace.config.sizes import Unit, parse_size
from headrace.types import did_you_mean

log = logging.getLogger(__name__)

ENV_PREFIX = "HEADRACE_"
Check = Callable[[str, Any], None]
Spellings = Mapping[str, str | tuple[str, str]]
"""Another name of a value -> the value, or the value and what is to be said of it."""
NO_SPELLINGS: Spellings = {}


def setting(
    default: Any,
    help: str,
    *aliases: str,
    name: str = "",
    check: Check | None = None,
    common: bool = False,
    everywhere: bool = False,
    rare: bool = False,
    secret: bool = False,
    unit: Unit | None = None,
    spellings: Spellings = NO_SPELLINGS,
) -> Any:
    """A field with its help text and further flag names (vLLM's, where the meaning is the same).

    `name`: its flat name, if that is not the record's prefix and the field's name. `check` raises ValueError for values
    that cannot work whatever the others are. `common`: most users need it. `everywhere`: a setting of the server that
    commands without one have too. `rare`: for experiments and odd machines; only --help-all shows it.
    `secret`: no repr shows its value. `unit`: of a size, which may be given as text, such as 128k or 16GiB.
    `spellings`: other names of values, in lower case.
    """
    told = dict(help=help, aliases=aliases, name=name, check=check, common=common, everywhere=everywhere, rare=rare)
    return field(default=default, repr=not secret, metadata=told | dict(secret=secret, unit=unit, spellings=spellings))


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. `name`: its keyword of EngineConfig; `record` and `field`: where it is read."""

    name: str
    record: type[SettingsRecord]
    field: str
    kind: Any
    default: Any
    help: str
    aliases: tuple[str, ...]
    common: bool
    everywhere: bool
    check: Check | None
    rare: bool
    secret: bool
    unit: Unit | None
    spellings: Spellings

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return env_name(self.name)

    @property
    def optional(self) -> bool:
        return get_origin(self.kind) in (Union, types.UnionType) and type(None) in get_args(self.kind)

    @property
    def free_text(self) -> bool:
        """Whether a value may be given in more forms than its type has."""
        return self.unit is not None or get_origin(self.kind) is Literal

    @property
    def given_kind(self) -> Any:
        """The types in which a value may be given."""
        return self.kind if self.unit is None else str | self.kind

    def value_of(self, given: Any) -> Any:
        """A value given as text in a form of its own, as the setting's type, and a path as text; others as they are."""
        if isinstance(given, PathLike):
            given = fspath(given)
        return self.parse(given) if isinstance(given, str) and self.free_text else given

    def checked(self, value: Any) -> None:
        """Raises ValueError naming the setting for a value that cannot work."""
        if value is None and self.optional:
            return
        if get_origin(self.kind) is Literal and value not in get_args(self.kind):
            raise self._no_choice(self.name, value)
        fits = self._fits(value)
        if self.check is not None:
            try:
                self.check(self.name, value)
            except (TypeError, AttributeError):
                if fits:
                    raise
        if not fits:
            raise ValueError(f"{self.name} must be {' or '.join(self._told)}, got {value!r}")

    @property
    def _kinds(self) -> list[type]:
        """The plain types among those that a value may have; none of a choice."""
        return [kind for kind in get_args(self.kind) or (self.kind,) if kind in TOLD]

    @property
    def _told(self) -> list[str]:
        return [*(TOLD[kind] for kind in self._kinds), *(["None"] if self.optional else [])]

    def _fits(self, value: Any) -> bool:
        if isinstance(value, bool) or not self._kinds:
            return bool in self._kinds or not self._kinds
        return isinstance(value, (*self._kinds, int) if float in self._kinds else tuple(self._kinds))

    def _choice(self, called: str, text: str) -> str:
        plain = text.strip().lower()
        found = self.spellings.get(plain, plain)
        if isinstance(found, tuple):
            log.warning("%s %s: %s", called, plain, found[1])
            found = found[0]
        if found not in get_args(self.kind):
            raise self._no_choice(called, text)
        return found

    def _no_choice(self, called: str, value: Any) -> ValueError:
        known = get_args(self.kind)
        meant = did_you_mean(value, known) if isinstance(value, str) else ""
        return ValueError(f"{called} must be one of {', '.join(known)}, got {value!r}{meant}")

    def parse(self, text: str, called: str = "") -> Any:
        """The value from its text form. Raises ValueError naming the setting, as it is `called` where it was given."""
        called = called or self.name
        if self.unit is not None:
            return parse_size(called, text, self.unit)
        if get_origin(self.kind) is Literal:
            return self._choice(called, text)
        kinds = [kind for kind in get_args(self.kind) if isinstance(kind, type)] or [self.kind]
        if bool in kinds:
            if text.lower() not in ("1", "0", "true", "false", "yes", "no"):
                raise ValueError(f"{called} must be true or false, got {text!r}")
            return text.lower() in ("1", "true", "yes")
        for kind, told in ((int, "an integer"), (float, "a number")):
            if kind in kinds:
                try:
                    return kind(text)
                except ValueError:
                    raise ValueError(f"{called} must be {told}, got {text!r}") from None
        return text


TOLD: Mapping[type, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


class SettingsRecord:
    """Settings of one room, a frozen dataclass of `setting` fields. `prefix` begins their flat names, `title` heads
    them in help texts. Raises ValueError, naming the setting and the remedy, for values that cannot work."""

    __slots__ = ()
    prefix: ClassVar[str] = ""
    title: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for item in settings_of(type(self)):
            item.checked(getattr(self, item.field))
        self.check_together()

    def check_together(self) -> None:
        """Raises ValueError for settings of this record that do not fit each other."""


_DECLARED: dict[type[SettingsRecord], tuple[Setting, ...]] = {}


def settings_of(record: type[SettingsRecord]) -> tuple[Setting, ...]:
    """The settings that a record declares, in order."""
    if record not in _DECLARED:
        _DECLARED[record] = _declared(record)
    return _DECLARED[record]


def _declared(record: type[SettingsRecord]) -> tuple[Setting, ...]:
    hints = get_type_hints(record)
    found = []
    for item in fields(record):  # type: ignore[arg-type]
        told = dict(item.metadata)
        if told:
            name = told.pop("name") or record.prefix + item.name
            found.append(Setting(name, record, item.name, hints[item.name], item.default, **told))
    return tuple(found)


def env_name(name: str) -> str:
    """Environment twin of a setting: kv_cache_tokens -> HEADRACE_KV_CACHE_TOKENS."""
    return ENV_PREFIX + name.upper()


def need(given: bool, met: bool, name: str, what: str) -> None:
    """Raises ValueError if `name` is given without what it needs."""
    if given and not met:
        raise ValueError(f"{name} needs {what}")


def listed(names: Sequence[str], last: str) -> str:
    """a, b or c."""
    return f"{', '.join(names[:-1])} {last} {names[-1]}"


def at_least(low: int) -> Check:
    def check(name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")

    return check


def between(low: int, high: int) -> Check:
    """Both included."""

    def check(name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"{name} must be an integer between {low} and {high}, got {value!r}")

    return check


def _finite(wanted: str, fits: Callable[[float], bool]) -> Check:
    def check(name: str, value: Any) -> None:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and math.isfinite(value) and fits(value)):
            raise ValueError(f"{name} must be {wanted} and finite, got {value!r}")

    return check


def seconds(name: str, value: Any) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be above 0 and finite, got {value}")


NOT_NEGATIVE = _finite("0 or more", lambda value: value >= 0)
POSITIVE = _finite("above 0", lambda value: value > 0)
SHARE = _finite("between 0 and 1", lambda value: 0 <= value <= 1)
