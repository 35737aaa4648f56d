"""Compiles shapes of answers for the first time, in a process of its own (`confined_child`):
`python -m headrace.engine.structured.shape_worker FD`.

A client's schema, expression or grammar is bounded before the library for grammars sees it, and the library has limits
of its own. What passes both and still takes for ever, or ends the process, does so here.

First frames: JSON of the vocabulary (lengths of tokens, special ids, ends, added tokens by name), the tokens' bytes one
behind the other; answered by BEGUN. Request: JSON of the fields of a shape. Reply: JSON, null for a shape that can
be taken, else what is wrong with it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from itertools import accumulate, pairwise
from typing import Any

from headrace.engine.confined_child import BEGUN, allow, confine, receive, send

CPU_S = 5.0
"""Processor time of one shape; the worst that were found take a tenth."""

MEMORY_BYTES = 1 << 30
"""Private memory of the process, of which a vocabulary of 250,000 tokens takes some 150 MiB."""

MAX_REPLY = 1 << 20


def main(descriptor: int) -> None:
    from headrace.engine.structured.by_bytes import by_bytes
    from headrace.engine.structured.compile import check
    from headrace.errors import InvalidRequest
    from headrace.structured import Structured

    with socket.socket(fileno=descriptor) as link:
        confine(MEMORY_BYTES)
        said, spelled = receive(link), receive(link)
        if said is None or spelled is None:
            return
        told: dict[str, Any] = json.loads(said)
        tokens = [spelled[begin:end] for begin, end in pairwise(accumulate(told["lengths"], initial=0))]
        try:
            vocabulary = by_bytes(tokens, told["special"], told["ends"])
        except ValueError as error:
            send(link, str(error).encode())
            return
        send(link, BEGUN)
        while (request := receive(link)) is not None:
            allow(CPU_S)
            fault = None
            try:
                check(Structured(**json.loads(request)), vocabulary, told["added"])
            except InvalidRequest as error:
                fault = str(error)
            except MemoryError:
                raise  # ends the process, which tells the limit
            except Exception:  # whatever the library raises: of this shape alone
                fault = "the library for grammars failed on this shape; use a simpler one"
            allow(0)
            send(link, json.dumps(fault).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
    os._exit(0)
