"""`encrypted_content` of reasoning items: the reasoning's text in a form that clients carry back unread.

Clients that keep nothing at the server (store=false) ask for it and send it with the next turn. The client is shown the
reasoning anyway, so the text is encoded, not encrypted.
"""

from __future__ import annotations

import base64
import binascii

HEAD = "headrace1."


def sealed(text: str) -> str:
    return HEAD + base64.urlsafe_b64encode(text.encode()).decode()


def unsealed(given: str) -> str:
    """Raises ValueError for what is none of ours."""
    try:
        if given.startswith(HEAD):
            return base64.b64decode(given[len(HEAD) :], b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError, ValueError):
        pass
    raise ValueError("it is not from this server; leave the reasoning item out")
