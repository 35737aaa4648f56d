"""Proof that answers fit their schemas (`make test-schemas`).

    python -m tools.schemas.run [--seeds 5] [--only PART] [--json PATH]

1. Every group of the official JSON-Schema-Test-Suite that is not refused: no invalid instance is accepted, and it is
   counted which valid ones are, as `json.dumps` writes them.
2. The same groups' schemas, and 200 schemas as clients send them: the shipped model answers each at temperature 1 with
   several seeds. Every answer that ends by itself is valid, every other one begins a valid one, and none hangs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace import LLM, InvalidRequest, SamplingParams
from headrace.engine.structured.compile import check
from headrace.structured import Structured
from tools.schemas.accepting import Accepting, tokenizer
from tools.schemas.families import built
from tools.schemas.judging import fault
from tools.schemas.official import Group, fetched, groups
from tools.schemas.written import WRITTEN

PROMPT = "Write one JSON value."
MAX_TOKENS = 1500
MAX_TOKENS_OFFICIAL = 200
"""The suite's schemas bound little, so that answers of a small model mostly go on to the end."""


def shape(schema: Any) -> Structured:
    return Structured(json=json.dumps(schema))


def sound(group: Group, told: Counter[str]) -> list[str]:
    """Counts what becomes of a group's instances; the invalid ones that are accepted."""
    told["groups"] += 1
    try:
        accepting = Accepting(shape(group.schema))
    except InvalidRequest:
        told["groups refused"] += 1
        return []
    faults = []
    for value, valid in group.instances:
        text = json.dumps(value, ensure_ascii=False)
        accepted = accepting.whole(text)
        told[f"{'valid' if valid else 'invalid'} instances {'accepted' if accepted else 'rejected'}"] += 1
        if accepted and not valid:
            faults.append(f"{group.name}: accepts {text[:80]}")
    return faults


def answered(llm: LLM, name: str, schema: Any, seeds: int, told: Counter[str]) -> tuple[list[str], float]:
    """What is wrong with the answers of one schema, and how long they took together."""
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=MAX_TOKENS, structured=shape(schema))
        for seed in range(seeds)
    ]
    began = time.perf_counter()
    outputs = llm.generate([PROMPT] * seeds, params)
    took = time.perf_counter() - began
    faults = []
    for seed, output in enumerate(outputs):
        told[f"answers ended by {output.finish_reason}"] += 1
        told["tokens"] += len(output.token_ids)
        if output.finish_reason == "stop":
            wrong = fault(schema, output.text)
        else:
            wrong = None if Accepting(shape(schema)).begins(output.text) else "begins no valid answer"
        if output.finish_reason not in ("stop", "length"):
            wrong = f"ended by {output.finish_reason}"
        if wrong:
            faults.append(f"{name}, seed {seed}: {wrong}: {output.text[:200]}")
    return faults, took


def wanted(official: list[Group], only: str) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for group in official:
        bare = {**group.schema, "$schema": ""} if isinstance(group.schema, dict) else group.schema
        text = json.dumps(bare, sort_keys=True)  # most groups stand in each draft
        if text in seen:
            continue
        seen.add(text)
        try:
            check(shape(group.schema), tokenizer())
        except InvalidRequest:
            continue
        yield group.name, group.schema
    yield from [(name, schema) for name, schema in [*built(), *WRITTEN.items()] if only in name]


def compile_times(schemas: list[tuple[str, Any]]) -> list[float]:
    times = []
    for _, schema in schemas:
        began = time.perf_counter()
        Accepting(shape(schema))
        times.append(time.perf_counter() - began)
    return sorted(times)


def spread(times: list[float]) -> dict[str, float]:
    times = sorted(times)
    return {"p50_s": times[len(times) // 2], "p99_s": times[int(len(times) * 0.99)], "max_s": times[-1]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="schemas whose name has this part; none of the suite's")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    told: Counter[str] = Counter()
    faults: list[str] = []
    official = [] if arguments.only else list(groups(fetched()))
    for group in official:
        faults += sound(group, told)
    schemas = list(wanted(official, arguments.only))
    times = []
    with LLM("tiny") as llm:
        for number, (name, schema) in enumerate(schemas):
            print(f"\r{number + 1} of {len(schemas)} schemas", end="", file=sys.stderr, flush=True)
            found, took = answered(llm, name, schema, arguments.seeds, told)
            faults += found
            times.append(took)
    ours = [(name, schema) for name, schema in schemas if not name.startswith("draft")]
    result = {
        "counts": dict(sorted(told.items())),
        "schemas": len(schemas),
        "compile": spread(compile_times(ours)),
        f"{arguments.seeds} answers": spread(times),
        "faults": faults,
    }
    print(json.dumps(result, indent=1, ensure_ascii=False))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
