"""What a step's rows of a drafted sequence are worth, once tokens have been drawn from them.

tokens   known ... newest | drawn: a b c          the step computed rows for newest and the whole draft
draft                       a b x y               a and b are confirmed: rows of newest, a and b are kept
"""

from __future__ import annotations

from headrace.engine.sequence import SequenceState
from headrace.kv.cache import KVCache


def confirmed(sequence: SequenceState) -> int:
    """How many tokens this step has drawn, if all are the draft's: the row behind them says the next one. Else 0."""
    draft = sequence.draft
    drawn = sequence.tokens[sequence.computed - len(draft) :] if draft else []
    return len(drawn) if drawn == draft[: len(drawn)] else 0


def settle(sequence: SequenceState, cache: KVCache) -> int:
    """Ends a sequence's draft: the cache keeps rows of what was drawn, and of nothing else. The drafted tokens that
    were right. Of a model with recurrent layers their rows may have to be computed again (kv.states)."""
    draft, table = sequence.draft, sequence.table
    assert table is not None, "a step has computed its draft"
    known = table.length - len(draft)
    drawn = sequence.tokens[known:]
    right = next((i for i, token in enumerate(drawn) if [token] != draft[i : i + 1]), len(drawn))
    cache.keep(table, known - 1, min(known + right, len(sequence.tokens) - 1))
    sequence.draft = []
    sequence.forced = sequence.forced or sequence.remaining > 1
    return right
