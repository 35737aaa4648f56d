"""The file of API keys (--api-keys-file), in TOML: tenants with their keys, salts, weights, limits (docs/keys.md)."""

from __future__ import annotations

import hashlib
import re
import secrets
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from headrace.files import read_given

MOST_BYTES = 4 << 20
MOST_TENANTS = 1000
"""Each has labels of its own on a few metrics."""
MOST_KEYS = 10_000

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
HASHED = re.compile(r"sha256:([0-9a-fA-F]{64})")
PLAIN = re.compile(r"[\x21-\x7e]{8,512}")
BARE = re.compile(r"[A-Za-z0-9_-]+")
"""A name that TOML takes without quotation marks."""

MOST_SHARED = 0.9
"""Of the KV pool: the rest is there for requests of tenants without a share."""

Count = Annotated[int, Meta(ge=1, le=2**31)]
PerMinute = Annotated[int, Meta(ge=1, le=10**12)]


class Rules(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file says of a tenant beside its keys. A limit that is None is none.

    salt: keeps its cached chunks apart from all others' (None: its name). weight: its share where there is not enough
    for all. max_prompt_tokens, max_output_tokens: of one request in all. public_prefix_tokens: its requests may have
    that field. metrics: its keys may read /metrics. kv_share: of the KV pool, that its chunks keep against all others';
    kv_limit: of the pool, that they take at most. tier_quota: of each tier, that its chunks keep; None: the
    common kv_tenant_quota.
    """

    salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    weight: Annotated[float, Meta(ge=0.001, le=1000)] = 1.0
    max_concurrent_requests: Count | None = None
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None
    max_prompt_tokens: Count | None = None
    max_output_tokens: Count | None = None
    public_prefix_tokens: bool = False
    metrics: bool = False
    kv_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    kv_limit: Annotated[float, Meta(gt=0, le=1)] = 1.0
    tier_quota: Annotated[float, Meta(ge=0, le=1)] | None = None


@dataclass(frozen=True, slots=True)
class KeyFile:
    """rules: by tenant. owners: digest of a key -> its tenant. readable: all users of the machine may read the file."""

    rules: dict[str, Rules] = field(default_factory=dict)
    owners: dict[bytes, str] = field(default_factory=dict, repr=False)
    readable: bool = False


def digest(key: bytes) -> bytes:
    """Of equal length for all keys, so that comparing tells nothing about a key's."""
    return hashlib.sha256(key).digest()


def new_key() -> str:
    """A key with 256 bits of chance: its digest gives nothing away."""
    return "hr-" + secrets.token_urlsafe(32)


def hashed(key: str) -> str:
    """A key as the file should hold it."""
    return "sha256:" + digest(key.encode()).hex()


def lines_for(tenant: str, key: str) -> str:
    """A table of the file for a new tenant. Raises ValueError for a name that cannot be one."""
    _check_name(tenant)
    told = tenant if BARE.fullmatch(tenant) else f'"{tenant}"'
    return f'[tenants.{told}]\nkeys = ["{hashed(key)}"]'


def read_key_file(path: str) -> KeyFile:
    """Raises ValueError that names the file, and the line or the entry at fault. No message holds a key."""
    try:
        text = read_given(Path(path), MOST_BYTES).decode("utf-8-sig")
        readable = bool(Path(path).stat().st_mode & 0o004)
        rules, owners = parsed(tomllib.loads(text))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        if isinstance(error, UnicodeDecodeError):
            why = f"byte {error.start:,} is not UTF-8"
        raise ValueError(f"api_keys_file {path!r}: {why}") from None
    return KeyFile(rules, owners, readable)


def parsed(told: dict[str, Any]) -> tuple[dict[str, Rules], dict[bytes, str]]:
    """Rules and owners of a KeyFile, of what its TOML holds. Raises ValueError."""
    tenants = told.pop("tenants", None)
    if told:
        raise ValueError(f"{next(iter(told))!r} is not expected; tenants are tables [tenants.NAME]")
    if not isinstance(tenants, dict) or not tenants:
        raise ValueError("there are no tenants: add a table [tenants.NAME]; see headrace keys new")
    if len(tenants) > MOST_TENANTS:
        raise ValueError(f"at most {MOST_TENANTS:,} tenants, got {len(tenants):,}")
    rules: dict[str, Rules] = {}
    owners: dict[bytes, str] = {}
    for name, table in tenants.items():
        _check_name(name)
        if not isinstance(table, dict):
            raise ValueError(f"tenants.{name} must be a table")
        for where, key in _digests(f"tenants.{name}.keys", table.pop("keys", [])):
            if key in owners:
                raise ValueError(f"{where} is a key of tenant {owners[key]} already")
            owners[key] = name
        rules[name] = _rules(f"tenants.{name}", table)
    if len(owners) > MOST_KEYS:
        raise ValueError(f"at most {MOST_KEYS:,} keys, got {len(owners):,}")
    _check_salts(rules)
    _check_shares(rules)
    return rules, owners


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise ValueError(f"a tenant's name has 1 to 64 letters, digits, '.', '_' or '-', got {name[:70]!r}")


def _digests(where: str, keys: Any) -> Iterator[tuple[str, bytes]]:
    if not isinstance(keys, list):
        raise ValueError(f"{where} must be a list")
    for index, key in enumerate(keys):
        at = f"{where}[{index}]"
        if isinstance(key, str) and (found := HASHED.fullmatch(key)):
            yield at, bytes.fromhex(found[1])
        elif isinstance(key, str) and PLAIN.fullmatch(key) and not key.startswith("sha256:"):
            yield at, digest(key.encode())
        else:
            raise ValueError(f"{at} must be sha256: and 64 hexadecimal digits, or a key of 8 to 512 ASCII characters "
                             "without spaces")  # fmt: skip


def _rules(where: str, table: dict[str, Any]) -> Rules:
    try:
        return msgspec.convert(table, Rules)
    except msgspec.ValidationError as error:
        told, _, field_name = str(error).replace("`", "").replace(" | null", "").partition(" - at $")
        raise ValueError(f"{where}{field_name}: {told[:1].lower()}{told[1:]}") from None


def _check_salts(rules: dict[str, Rules]) -> None:
    """Two tenants with one salt would share chunks."""
    seen: dict[str, str] = {}
    for name, each in rules.items():
        other = seen.setdefault(each.salt or name, name)
        if other != name:
            raise ValueError(f"tenants.{name} has the salt of tenant {other}: they would share cached chunks")


def _check_shares(rules: dict[str, Rules]) -> None:
    together = sum(each.kv_share for each in rules.values())
    if together > MOST_SHARED + 1e-9:
        raise ValueError(f"kv_share of all tenants is {together:g} together, more than {MOST_SHARED}: lower some")
    together = sum(each.tier_quota or 0.0 for each in rules.values())
    if together > 1 + 1e-9:
        raise ValueError(f"tier_quota of all tenants is {together:g} together, more than 1: lower some")
    for name, each in rules.items():
        if each.kv_share > each.kv_limit:
            raise ValueError(f"tenants.{name}: kv_share {each.kv_share:g} is above its kv_limit {each.kv_limit:g}")
