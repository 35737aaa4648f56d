"""Triton's interpreter without work that it does anew at each call of a kernel and of each function of a kernel."""

from __future__ import annotations

from types import SimpleNamespace

import triton.language as tl
from triton.runtime import interpreter


def prepare_once() -> None:
    """Puts the interpreter's functions in place of those of Triton's language for good. By itself the interpreter looks
    for them among all members of the language at each call, which takes half of its time."""
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    nothing_to_restore = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda fn: nothing_to_restore
