"""ChunkAttention's table (arXiv 2402.15220, table 3) on its shapes: decoding where sequences share a prefix.

32 heads of 128, 32 sequences of n_p tokens, of which n_s are shared. Beside ours: our kernels on the same shared pages
without the first phase, each sequence walking all of its own ('pages'; the paper's PagedAttention with shared memory),
and torch's attention on copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from headrace.attention.plan import Plan, build
from headrace.bench.attention_testbed import MHA, decode_spans, shared, slots_of, unmerged
from tools.gpu.attention import attending, compared, copies, drawn_pool
from tools.gpu.runner import Case, Goal, Row

SEQUENCES = 32
GOALS = {1024: 3.0, 2048: 3.2, 4096: 3.5}
"""Times as fast as pages, where everything is shared."""
THEIRS = {
    (1024, 512): 1.30, (1024, 768): 1.64, (1024, 1024): 2.76, (2048, 1024): 1.31, (2048, 1536): 1.70,
    (2048, 2048): 3.06, (4096, 2048): 1.34, (4096, 3072): 1.74, (4096, 4096): 3.22,
}  # fmt: skip
"""The paper's own gains on an A100, by (n_p, n_s)."""


def cases() -> Iterator[Case]:
    for length, common in sorted(THEIRS, key=lambda each: each[0] != each[1]):
        yield Case(f"{common} of {length} shared", partial(case, length, common))


def plans(length: int, common: int, sequences: int = SEQUENCES) -> tuple[Plan, Plan, int]:
    """The plan of one step in two phases, the plan of the same pages walked by each sequence alone, and the slots that
    both name."""
    paths = shared([sequences], [common], length - common)
    return build(decode_spans(paths, length)), unmerged(paths, length), slots_of(paths)


def case(length: int, common: int) -> Row:
    ours, pages, slots = plans(length, common)
    pool = drawn_pool(slots, MHA)
    runs = {"ours": attending(ours, MHA, pool), "pages": attending(pages, MHA, pool)}
    figures = compared(runs | copies(SEQUENCES, 1, length, MHA))
    figures |= {"over_pages": figures["pages_ms"] / figures["ours_ms"], "in_the_paper": THEIRS[length, common]}
    goals = (Goal("over_pages", GOALS[length]),) if common == length else ()
    return Row(f"{common:,} of {length:,} shared", figures, goals)
