"""What Anthropic's coding client writes anew into the system text, kept out of the prefix (--stable-system-prompt).

A prefix is shared up to the first token that differs, so one changing line at the beginning costs all that follows: the
system text, the tools and the conversation. docs/anthropic.md lists the lines.
"""

from __future__ import annotations

import re

BILLING_NAME = "x-anthropic-billing-header:"

BILLING = re.compile(rf"^{BILLING_NAME}(?:[ \t]*[\w.-]+=[^;\s]*;?)*[ \t]*\n?", re.MULTILINE)
"""For the provider, not the model: its `cch` is another with each request. Text after it on its line stays."""

DATE = re.compile(r"^[ \t]*(?:-[ \t]*)?Today's date(?: is)?:?[ \t]*\d{4}-\d\d-\d\d\.?[ \t]*(?:\n|\Z)", re.MULTILINE)

GIT_STATUS = re.compile(r"^gitStatus:.*\Z", re.MULTILINE | re.DOTALL)
"""To the end of its block, which it closes: branch, changed files, latest commits."""


def has_billing(texts: list[str]) -> bool:
    return any(text.startswith(BILLING_NAME) for text in texts)


def stable(texts: list[str]) -> tuple[list[str], str]:
    """The blocks of a system text without what changes, and what of it the model should still read, behind them."""
    kept, moved = [], []
    for text in texts:
        text = BILLING.sub("", text)
        for changing in (DATE, GIT_STATUS):
            moved += [found.strip() for found in changing.findall(text)]
            text = changing.sub("", text)
        if text.strip():
            kept.append(text)
    return kept, "\n".join(moved)
