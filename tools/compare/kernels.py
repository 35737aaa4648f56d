"""Times two builds of the kernels in one process, on the same memory, in turns: what a change of csrc is worth.

    python tools/compare/kernels.py BEFORE AFTER [--cases decode:32/8x128:16:2048,...] [--threads 1,2] [--rounds 15]

BEFORE and AFTER are revisions of this repository (built once, in build/compare), '.' for the working tree, or modules.
Both must lay keys, values and weights out alike. Separate processes differ by more than most changes bring: where their
memory lies, and when the host is busy.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.attention.plan import Plan, Span, build
from headrace.bench import attention_testbed as testbeds
from headrace.bench.attention_testbed import Repeated
from headrace.bench.limits import seconds, threads
from headrace.kernels import extension, ops
from headrace.memory import copied
from headrace.types import CHUNK

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "compare"
SPREAD = 256 << 20
"""Bytes that a case walks through, so that caches hold none of it when it comes again."""

CASES = """what is timed, by commas, HEADS being query heads/KV headsxhead size:
decode:HEADS:SEQUENCES:LENGTH (nothing shared), shared:HEADS:PREFIX:SEQUENCES:OWN, first:HEADS:PREFIX:SEQUENCES (what is
shared alone), own:HEADS:PREFIX:SEQUENCES:OWN (the rest), tree:HEADS (of W4), prefill:HEADS:NEW:CACHED,
linear:ROWS:OUTPUTS:INPUTS[:int8 or int4]"""
DEFAULT = (
    "decode:32/32x128:1:8192,decode:32/8x128:16:2048,shared:16/4x64:8192:16:96,first:32/8x128:8192:32,tree:16/4x64,"
    "prefill:32/8x128:512:8192,linear:1:11008:4096,linear:16:11008:4096,linear:64:11008:4096"
)


def module(which: str, name: str) -> Any:
    """The extension module of a revision, of the working tree or of a file, apart from any other in this process.
    name: four letters of its own."""
    path = Path(which) if which.endswith(".so") else _built(which)
    # nanobind shares the types of modules of one domain, and the first one's methods would serve both.
    code = path.read_bytes()
    key = next((key for key in (b"headrace_kernels", b"nb_internals") if key in code), None)
    if key is None or len(name) != 4:
        sys.exit(f"{path} cannot be told from another module: no domain in it to be replaced by a name of four letters")
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / path.name
        own.write_bytes(code.replace(key, key[:-4] + name.encode()))
        loader = ExtensionFileLoader("headrace.kernels._cpu", str(own))
        loaded = module_from_spec(spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
        loader.exec_module(loaded)
    return loaded


def _built(which: str) -> Path:
    commit = "" if which == "." else _git("rev-parse", "--verify", "--short", which + "^{commit}").decode().strip()
    package = BUILD / (commit or "tree")
    if not commit or not package.exists():
        print(f"building {which}", file=sys.stderr)
        shutil.rmtree(package, ignore_errors=True)
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:
            source = Path(folder) / "source" if commit else ROOT
            if commit:
                with tarfile.open(fileobj=io.BytesIO(_git("archive", commit))) as files:
                    files.extractall(source)
            command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
            variables = {**os.environ, "HEADRACE_ISA_BUILD": "all"}
            subprocess.run([*command, "--target", f"{folder}/package", str(source)], check=True, env=variables)
            _module_in(Path(folder) / "package")
            os.replace(f"{folder}/package", package)
    return _module_in(package)


def _module_in(package: Path) -> Path:
    for path in (package / "headrace" / "kernels").glob("_cpu*.so"):
        return path
    sys.exit("the kernels were not built: a C++ compiler is needed")


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE)
    return done.stdout if done.returncode == 0 else sys.exit(done.returncode)


def heads_of(text: str) -> testbeds.Heads:
    """'32/8x128': 32 query heads and 8 KV heads of 128."""
    heads, kv_heads, dim = map(int, re.fullmatch(r"([1-9]\d*)/([1-9]\d*)x([1-9]\d*)", text).groups())  # type: ignore[union-attr]
    return testbeds.Heads(text, heads, kv_heads, dim)


def case(text: str) -> Callable[[], Repeated]:
    """What prepares a case: a call that does the work in every layer, or with every copy of the weight.

    Raises ValueError for what is not one of CASES."""
    kind, *given = text.split(":")
    try:
        make, types = KINDS[kind]
        given += ["none"] * (kind == "linear" and len(given) == 3)
        return partial(make, *(take(each) for take, each in zip(types, given, strict=True)))
    except (AttributeError, KeyError, ValueError):
        raise ValueError(f"no case {text!r}; {CASES}") from None


def _decode(heads: testbeds.Heads, sequences: int, length: int) -> Repeated:
    paths = testbeds.private(sequences, length)
    return _attention(heads, paths, build(testbeds.decode_spans(paths, length)))


def _shared_plan(prefix: int, sequences: int, own: int) -> tuple[list[list[int]], Plan]:
    paths = testbeds.shared([sequences], [prefix], own)
    return paths, build(testbeds.decode_spans(paths, prefix + own))


def _shared(heads: testbeds.Heads, prefix: int, sequences: int, own: int) -> Repeated:
    return _attention(heads, *_shared_plan(prefix, sequences, own))


def _first(heads: testbeds.Heads, prefix: int, sequences: int) -> Repeated:
    paths, plan = _shared_plan(prefix, sequences, CHUNK)
    return _attention(heads, paths, testbeds.chunk_first(plan))


def _own(heads: testbeds.Heads, prefix: int, sequences: int, own: int) -> Repeated:
    paths, plan = _shared_plan(prefix, sequences, own)
    return _attention(heads, paths, replace(plan, items=plan.items[plan.shared :].copy()))


def _tree(heads: testbeds.Heads) -> Repeated:
    paths = testbeds.shared([4, 8], [1024, 3072], CHUNK)
    return _attention(heads, paths, build(testbeds.decode_spans(paths, 4096 + CHUNK)))


def _prefill(heads: testbeds.Heads, new: int, cached: int) -> Repeated:
    paths = testbeds.private(1, new + cached)
    return _attention(heads, paths, build([Span(np.array(paths[0], dtype=np.int32), cached, new)]))


def _attention(heads: testbeds.Heads, paths: list[list[int]], plan: Plan) -> Repeated:
    slots = testbeds.slots_of(paths)
    layers = max(1, round(SPREAD / (slots * CHUNK * heads.token_bytes)))
    return testbeds.AttentionTestbed(heads, slots, "cpu", layers=layers).attend(plan)


def _linear(rows: int, outputs: int, inputs: int, scheme: Any) -> Repeated:
    weight = ops.pack(torch.randn(outputs, inputs).bfloat16(), scheme)
    weights = [weight, *(_copy(weight) for _ in range(SPREAD // weight.nbytes))]
    x = torch.randn(rows, inputs).bfloat16()

    def step() -> object:
        for weight in weights:
            out = ops.linear(x, weight)
        return out

    return Repeated(step, len(weights))


KINDS: dict[str, tuple[Callable[..., Repeated], list[Callable[[str], Any]]]] = {
    "decode": (_decode, [heads_of, int, int]),
    "shared": (_shared, [heads_of, int, int, int]),
    "first": (_first, [heads_of, int, int]),
    "own": (_own, [heads_of, int, int, int]),
    "tree": (_tree, [heads_of]),
    "prefill": (_prefill, [heads_of, int, int]),
    "linear": (_linear, [int, int, int, str]),
}


def _copy(weight: Any) -> Any:
    """In memory of its own, in huge pages."""
    new = copy(weight)
    for name in weight.__slots__:
        if isinstance(value := getattr(weight, name), Tensor):
            setattr(new, name, copied(value))
    return new


@torch.inference_mode()
def compare(both: list[Any], make: Callable[[], Repeated], rounds: int) -> list[list[float]]:
    """Milliseconds of one layer in each round for each of the two, which take turns in an order drawn anew."""
    extension._ext = both[0]
    run = make()
    times: list[list[float]] = [[], []]
    results: list[Any] = []
    for each in both:
        extension._ext = each
        results.append(run())
    if not torch.equal(*results):
        print("not the same bits; ", end="")
    if not torch.allclose(*results, rtol=0.05, atol=0.05 * results[0].abs().max().item()):
        sys.exit("the two give different results; do they lay keys, values and weights out alike?")
    for _ in range(rounds):
        for each in random.sample((0, 1), 2):
            extension._ext = both[each]
            times[each].append(seconds(run) / run.calls * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--cases", default=DEFAULT, help=CASES)
    parser.add_argument("--threads", default=str(torch.get_num_threads()), help="numbers of threads, by commas")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--isa", help="instruction set (default: the best one here)")
    args = parser.parse_args()
    try:
        cases = {text: case(text) for text in args.cases.split(",")}
        counts = [int(count) for count in args.threads.split(",")]
        both = [module(args.before, "aaaa"), module(args.after, "bbbb")]
        for each in both:
            each.use_isa(args.isa or both[0].isa())
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"{both[0].isa()}; ms of a layer, medians of {args.rounds}; x: how many times as fast, by minima too")
    for text, make in cases.items():
        for count in counts:
            with threads(count):
                before, after = compare(both, make, args.rounds)
            middle, least = [statistics.median(x) for x in (before, after)], [min(x) for x in (before, after)]
            print(
                f"{text:<32} {count} threads {middle[0]:9.3f} {middle[1]:9.3f}"
                f"   x {middle[0] / middle[1]:.3f} {least[0] / least[1]:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
