"""Times two builds of the kernels in one process, on the same memory, in turns: what a change of csrc is worth.

    python tools/compare/kernels.py BEFORE AFTER [--cases decode:32/8x128:16:2048,...] [--threads 1,2] [--rounds 15]

BEFORE and AFTER are revisions of this repository, '.' for the working tree, or extension modules that are there.
Both must lay keys, values and weights out alike. Separate processes differ by more than most changes bring: where their
memory lies, and when the host is busy.
"""

from __future__ import annotations

import argparse
import io
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.attention.plan import Span, build
from headrace.cli import bench_beds as beds
from headrace.cli.bench_limits import seconds, threads
from headrace.kernels import extension, ops
from headrace.memory import copied

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
    """The extension module of a revision, of the working tree or of a file, apart from any other in this process."""
    path = Path(which) if which.endswith(".so") else _built(which)
    # nanobind shares the types of modules that name the same internals, and the first one's methods would serve both.
    own = Path(tempfile.mkdtemp()) / path.name
    own.write_bytes(path.read_bytes().replace(b"nb_internals", f"nb_inter{name:>4}".encode()))
    loader = ExtensionFileLoader("headrace.kernels._cpu", str(own))
    loaded = module_from_spec(spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
    loader.exec_module(loaded)
    return loaded


def _built(which: str) -> Path:
    package = BUILD / "packages" / ("tree" if which == "." else _git("rev-parse", "--short", which).decode().strip())
    if which == "." or not package.exists():
        print(f"building {which}", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            if which != ".":
                with tarfile.open(fileobj=io.BytesIO(_git("archive", which))) as files:
                    files.extractall(folder, filter="data")
            command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
            tree = ROOT if which == "." else folder
            subprocess.run([*command, "--upgrade", "--target", str(package), str(tree)], check=True)
    return next((package / "headrace" / "kernels").glob("_cpu*.so"))


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout


def heads_of(text: str) -> beds.Heads:
    """'32/8x128': 32 query heads and 8 KV heads of 128."""
    heads, rest = text.split("/")
    kv_heads, dim = rest.split("x")
    return beds.Heads(text, int(heads), int(kv_heads), int(dim))


def case(text: str) -> Callable[[], object]:
    """A call that does the work once in every layer. Raises ValueError for what is not one of CASES."""
    kind, *arguments = text.split(":")
    makers = {"decode": _decode, "shared": _shared, "first": _first, "own": _own, "tree": _tree}
    makers |= {"prefill": _prefill, "linear": _linear}
    try:
        return makers[kind](*arguments)
    except (KeyError, TypeError) as error:
        raise ValueError(f"no case {text!r}; {CASES}") from error


def _decode(heads: str, sequences: str, length: str) -> Callable[[], object]:
    paths = beds.private(int(sequences), int(length))
    return _attention(heads, paths, build(beds.decode_spans(paths, int(length))))


def _shared_plan(prefix: str, sequences: str, own: str) -> tuple[list[list[int]], Any]:
    paths = beds.shared([int(sequences)], [int(prefix)], int(own))
    return paths, build(beds.decode_spans(paths, int(prefix) + int(own)))


def _shared(heads: str, prefix: str, sequences: str, own: str) -> Callable[[], object]:
    return _attention(heads, *_shared_plan(prefix, sequences, own))


def _first(heads: str, prefix: str, sequences: str) -> Callable[[], object]:
    paths, plan = _shared_plan(prefix, sequences, "64")
    return _attention(heads, paths, beds.chunk_first(plan))


def _own(heads: str, prefix: str, sequences: str, own: str) -> Callable[[], object]:
    paths, plan = _shared_plan(prefix, sequences, own)
    return _attention(heads, paths, replace(plan, items=plan.items[plan.shared :].copy()))


def _tree(heads: str) -> Callable[[], object]:
    paths = beds.shared([4, 8], [1024, 3072], 64)
    return _attention(heads, paths, build(beds.decode_spans(paths, 4096 + 64)))


def _prefill(heads: str, new: str, cached: str) -> Callable[[], object]:
    paths = beds.private(1, int(new) + int(cached))
    return _attention(heads, paths, build([Span(np.array(paths[0], dtype=np.int32), int(cached), int(new))]))


def _attention(heads: str, paths: list[list[int]], plan: Any) -> Callable[[], object]:
    shape, slots = heads_of(heads), beds.slots_of(paths)
    layers = max(1, round(SPREAD / (slots * 64 * shape.token_bytes)))
    return beds.Bed(shape, slots, "cpu", layers=layers).attend(plan)


def _linear(rows: str, outputs: str, inputs: str, *scheme: Any) -> Callable[[], object]:
    weight = ops.pack(torch.randn(int(outputs), int(inputs)).bfloat16(), *scheme)
    weights = [weight, *(_copy(weight) for _ in range(SPREAD // weight.nbytes))]
    x = torch.randn(int(rows), int(inputs)).bfloat16()

    def step() -> object:
        for weight in weights:
            out = ops.linear(x, weight)
        return out

    return step


def _copy(weight: Any) -> Any:
    """In memory of its own, in huge pages."""
    new = copy(weight)
    for name in weight.__slots__:
        if isinstance(value := getattr(weight, name), Tensor):
            setattr(new, name, copied(value))
    return new


@torch.inference_mode()
def compare(both: list[Any], text: str, rounds: int) -> list[list[float]]:
    """Seconds of each round for each of the two, which take turns: A B, B A, ..."""
    extension._ext = both[0]
    run = case(text)
    times: list[list[float]] = [[], []]
    for each in (0, 1):
        extension._ext = both[each]
        run()
    for _ in range(rounds):
        for each in random.sample((0, 1), 2):
            extension._ext = both[each]
            times[each].append(seconds(run))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--cases", default=DEFAULT, help=CASES)
    parser.add_argument("--threads", default=str(torch.get_num_threads()))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--isa", help="instruction set (default: the best one here)")
    args = parser.parse_args()
    both = [module(args.before, "a"), module(args.after, "b")]
    for each in both:
        if args.isa:
            each.use_isa(args.isa)
    print(f"{both[0].isa()}; ms, medians of {args.rounds}; how many times as fast AFTER is, by medians and by minima")
    for text in args.cases.split(","):
        for count in map(int, args.threads.split(",")):
            try:
                with threads(count):
                    before, after = compare(both, text, args.rounds)
            except ValueError as error:
                sys.exit(str(error))
            medians, least = [statistics.median(x) * 1e3 for x in (before, after)], [min(x) for x in (before, after)]
            print(
                f"{text:<32} {count} threads {medians[0]:9.2f} {medians[1]:9.2f}"
                f"   x {medians[0] / medians[1]:.3f} {least[0] / least[1]:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
