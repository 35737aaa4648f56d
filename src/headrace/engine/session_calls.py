"""How calls about saved sessions are answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.engine.calls import DeleteSession, ListSessions, LoadSession, ReadSession, SaveSession
from headrace.engine.sessions import Sessions

if TYPE_CHECKING:
    from headrace.engine.core import EngineCore
    from headrace.engine.loader import Loaded


def sessions_of(core: EngineCore) -> Sessions:
    """Made for the first call. Raises InvalidRequest where no sessions are saved."""
    loaded: Loaded = core.loaded
    if loaded.sessions is None:
        config, namespace = loaded.config, loaded.decoder.config.rope_namespace
        config.sessions.must_save(config.cache.prefix_caching)
        parts = config, loaded.capacity, loaded.cache, loaded.executor, loaded.offload
        loaded.sessions = Sessions(*parts, namespace)
    return loaded.sessions


SESSION_HANDLERS: dict[type, Callable[[EngineCore, Any], Any]] = {
    SaveSession: lambda core, call: sessions_of(core).save(core, call),
    ReadSession: lambda core, call: sessions_of(core).read(core, call),
    LoadSession: lambda core, call: sessions_of(core).load(core, call),
    ListSessions: lambda core, call: sessions_of(core).listed(core, call),
    DeleteSession: lambda core, call: sessions_of(core).delete(core, call),
}
