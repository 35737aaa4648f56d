"""For models of no known format: {"name": ..., "arguments" or "parameters": {...}}, or a list of such."""

from __future__ import annotations

from headrace.server.parsers.llama_json import LlamaJsonParser


class PlainJsonParser(LlamaJsonParser):
    marks = ()
