"""Who may ask this server: who has the one key, the tenants of a file of keys, or anybody where there is neither."""

from __future__ import annotations

import hmac
import logging
from collections import Counter
from collections.abc import Iterable

from headrace.config.server import ServerSettings
from headrace.logs import fields
from headrace.server.keyfile import KeyFile, Rules, digest, read_key_file
from headrace.server.tenants import Tenant

log = logging.getLogger("headrace.server")


class Keyring:
    """guarded: a key is needed. tenants: those of the file, by name. Raises ValueError for a file of no use."""

    def __init__(self, settings: ServerSettings) -> None:
        self._path = settings.api_keys_file
        self._one = None if settings.api_key is None else digest(settings.api_key.encode())
        self._file = KeyFile()
        self.tenants: dict[str, Tenant] = {}
        self.guarded = bool(self._one or self._path is not None)
        self.anybody = Tenant("", Rules(), salted=self._path is not None)
        if self._path is not None:
            self._use(read_key_file(self._path))

    def tenant(self, presented: Iterable[bytes]) -> Tenant | None:
        """Whose key is among these; None where nobody's is.

        A key is found by its digest, which whoever guesses cannot choose byte by byte, and compared in constant time.
        """
        if not self.guarded:
            return self.anybody
        for given in map(digest, presented):
            if self._one is not None and hmac.compare_digest(self._one, given):
                return self.anybody
            if (owner := self._file.owners.get(given)) is not None:
                return self.tenants[owner]
        return None

    def reload(self) -> None:
        """Reads the file again. One that cannot be used changes nothing. The log tells, also where there is no file."""
        if self._path is None:
            log.info("SIGHUP: there is nothing to read again without --api-keys-file")
            return
        before = self._file
        try:
            self._use(read_key_file(self._path))
        except ValueError as error:
            log.error("the keys stay as they were: %s", error)
            return
        told = changes(before, self._file)
        log.info("keys read again: %s", told, extra=fields(tenants=len(self.tenants), keys=len(self._file.owners)))

    def beyond_share(self, tenant: Tenant) -> bool:
        """Whether its requests are more than its weight's share of all that are under way, among the tenants that have
        any. There is always one that is not beyond its share."""
        known = [*self.tenants.values(), self.anybody]
        others = [each for each in known if each.under_way and each is not tenant]
        weight = tenant.rules.weight
        total = weight + sum(each.rules.weight for each in others)
        under_way = tenant.under_way + sum(each.under_way for each in others)
        return tenant.under_way * total > weight * under_way

    def _use(self, file: KeyFile) -> None:
        if file.readable:
            log.warning("api_keys_file %r can be read by all users of this machine: chmod o-r", self._path)
        for name, rules in file.rules.items():
            if name in self.tenants:
                self.tenants[name].follow(rules)
            else:
                self.tenants[name] = Tenant(name, rules)
        self.tenants = {name: self.tenants[name] for name in file.rules}
        self._file = file


def changes(before: KeyFile, after: KeyFile) -> str:
    """'1 key added (acme), 2 removed (old); changed: acme'."""
    parts = []
    for what, one, other in (("added", after, before), ("removed", before, after)):
        owners = Counter(name for key, name in one.owners.items() if other.owners.get(key) != name)
        if owners:
            parts.append(f"{owners.total():,} key{'s' * (owners.total() != 1)} {what} ({_names(owners)})")
    known = before.rules.keys() & after.rules.keys()
    if changed := [name for name in after.rules if name in known and before.rules[name] != after.rules[name]]:
        parts.append(f"rules changed ({_names(changed)})")
    if gone := [name for name in before.rules if name not in after.rules]:
        parts.append(f"tenants removed ({_names(gone)})")
    return "; ".join(parts) or "no change"


MOST_NAMED = 10


def _names(names: Iterable[str]) -> str:
    listed = sorted(names)
    rest = len(listed) - MOST_NAMED
    return ", ".join(listed[:MOST_NAMED]) + (f" and {rest:,} more" if rest > 0 else "")
