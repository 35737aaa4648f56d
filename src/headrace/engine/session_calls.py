"""How calls about saved sessions are answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.engine.calls import DeleteSession, ListSessions, LoadSession, ReadSession, SaveSession

if TYPE_CHECKING:
    from headrace.engine.core import EngineCore
    from headrace.engine.loader import Loaded
    from headrace.engine.sessions import Sessions


def _of(core: EngineCore) -> Sessions:
    loaded: Loaded = core.loaded
    return loaded.saved_sessions()


SESSION_HANDLERS: dict[type, Callable[[EngineCore, Any], Any]] = {
    SaveSession: lambda core, call: _of(core).save(core, call),
    ReadSession: lambda core, call: _of(core).read(core, call),
    LoadSession: lambda core, call: _of(core).load(core, call),
    ListSessions: lambda core, call: _of(core).listed(core, call),
    DeleteSession: lambda core, call: _of(core).delete(core, call),
}
