"""Times of pages of /v1/cache/tree on 100,000 chunks, by the shape of the tree.

Of each shape: a page as the engine makes it (one piece between two steps), and the same page over HTTP from a server
whose engine computes nothing else.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from headrace.bench.result import machine
from headrace.engine.call_handlers import CallHandlers
from headrace.engine.calls import TreePage
from headrace.kv.cache import KVCache
from headrace.kv.pins import Pins
from headrace.kv.tree import Node, tenant_mark
from tests.support.fake_server import serving

NODES = 100_000
SHAPES = {
    "one root with 99,999 children": lambda made, rng: 0,
    "one chain": lambda made, rng: made - 1,
    "bushy: each below any earlier one": lambda made, rng: rng.randrange(made),
    "conversations: runs of 37 below any earlier chunk": lambda made, rng: (
        made - 1 if made % 37 else rng.randrange(made)
    ),
    "comb: a chain with a leaf at each chunk": lambda made, rng: made - 1 if made % 2 else max(0, made - 2),
}
TENANTS = "5,000 tenants below a public chunk, all listed"
WANTED_MS = 50.0
LIMIT = 500


def grown(shape: str) -> KVCache:
    cache, rng, nodes = KVCache(NODES), random.Random(1), list[Node]()
    parent_of = SHAPES.get(shape, SHAPES["one root with 99,999 children"])
    for made in range(NODES):
        slot = cache.tree.take_slot()
        assert slot is not None
        node = Node(slot, None, None, None)
        node.tenant = tenant_mark(str(made % 5000)) if shape == TENANTS and made else b""
        cache.tree.insert(node, rng.randbytes(32), nodes[parent_of(made, rng)] if made else None)
        nodes.append(node)
    return cache


def measured(shape: str) -> dict[str, Any]:
    cache = grown(shape)
    gc.collect()
    gc.freeze()  # a server's process has no tree to look through for garbage
    core: Any = SimpleNamespace(
        cache=cache, pins=Pins(cache, NODES), loaded=SimpleNamespace(capacity=SimpleNamespace(kv_bytes_per_token=1024))
    )
    calls, everything = CallHandlers(core), shape == TENANTS
    pieces, after, chunks = [], None, 0
    while True:
        began = time.perf_counter()
        answer = calls.ask(TreePage(everything=everything, after=after, limit=LIMIT))
        pieces.append(1e3 * (time.perf_counter() - began))
        chunks += sum(each["chunks"] for each in answer["segments"])
        if answer["after"] is None:
            break
        after = tuple(answer["after"])
    assert chunks == NODES, "all pages together are the tree"
    over_http = http_times(calls, everything)
    return {
        "name": shape, "tree_nodes": NODES, "pages": len(pieces), "segments_a_page": LIMIT,
        **_told("engine_ms", pieces), **_told("http_ms", over_http), "wanted_ms": WANTED_MS,
    }  # fmt: skip


def http_times(calls: CallHandlers, everything: bool) -> list[float]:
    times = []
    with serving() as running:
        running.engine.answers[TreePage] = calls.ask
        query: dict[str, Any] = {"limit": LIMIT, **({"all": "true"} if everything else {})}
        while True:
            began = time.perf_counter()
            reply = running.http.get("/v1/cache/tree", params=query)
            times.append(1e3 * (time.perf_counter() - began))
            query["after"] = reply.json()["next"]
            if query["after"] is None:
                return times


def _told(name: str, times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    p99 = ordered[int(0.99 * (len(ordered) - 1))]
    return {f"{name}_median": round(statistics.median(times), 3), f"{name}_p99": round(p99, 3),
            f"{name}_most": round(ordered[-1], 3)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    file = parser.parse_args().json
    cases = []
    for shape in (*SHAPES, TENANTS):
        case = measured(shape)
        cases.append(case)
        times = (f"{case[f'{kind}_ms_{of}']} ms" for kind in ("engine", "http") for of in ("median", "p99", "most"))
        print(f"{shape}: {case['pages']:,} pages; median, 99 %, most: {', '.join(times)} (the last three over HTTP)")
    if file is not None:
        told = {"date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()), "machine": machine(),
                "command": f"python tools/tree_pages.py --json {file}", "cases": cases}  # fmt: skip
        file.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
