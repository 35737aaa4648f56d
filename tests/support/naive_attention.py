"""Attention without a cache design: the keys and values of one sequence in lists, plain softmax.

T: rows of a step, N: keys so far, Hq, Hkv: query and KV heads, D: head size.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from headrace.config import AttentionSpec
from headrace.kernels.backend import Attend
from headrace.kernels.indexer import IndexQueries
from headrace.models.decoder import Decoder, TokenBatch


class Rows:
    """Rows [n, Hkv, D] that a sequence has so far, with room for more: joining them anew at every row would take a test
    of a thousand rows longer than all else."""

    def __init__(self) -> None:
        self.room, self.count = torch.empty(0), 0

    def add(self, rows: Tensor) -> Tensor:
        """All of them, these among them."""
        first, self.count = self.count, self.count + len(rows)
        if self.count > len(self.room):
            room = rows.new_empty(2 * self.count, *rows.shape[1:])
            if first:
                room[:first] = self.room[:first]
            self.room = room
        self.room[first : self.count] = rows
        return self.room[: self.count]


class NaiveAttend(Attend):
    """An Attend for one sequence. Rows of a step must follow those of the step before."""

    def __init__(self, spec: AttentionSpec, key_bias: Tensor | None = None, sinks: list[Tensor] | None = None) -> None:
        self.spec, self.sinks = spec, sinks
        self.key_bias = key_bias
        self.keys = [Rows() for _ in range(spec.layers)]
        self.values = [Rows() for _ in range(spec.layers)]
        self.chosen: list[Tensor] = []
        """By the last layer with an indexer, of each row of the step: bool [keys that it sees]."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        return self.attend(layer, q, self.keys[layer].add(k), self.values[layer].add(v))

    def sparse(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, index: IndexQueries | None, rows: Tensor | None = None
    ) -> Tensor:
        """As Attend has it: rows one after another, over what each has chosen."""
        assert self.spec.index is not None
        if self.spec.index.block > 1:
            return self._by_blocks(layer, q, k, v, index)
        size, keys = self.spec.index.stored, self.keys[layer].add(k)
        seen = range(len(keys) - len(q) + 1, len(keys) + 1)
        if index is not None:
            assert index.weights is not None
            rows_of = zip(index.q, index.weights, seen, strict=True)
            self.chosen = [
                self._choice(q, weights, keys[:n, 0, :size])
                if index.places is None
                else self._pools(q, weights, keys[:n, 0, :size], index.places)
                for q, weights, n in rows_of
            ]
        met = [keys[:n, :, size:][self.chosen[row]] for row, n in enumerate(seen)]
        return torch.cat([self.attend(layer, q[row : row + 1], each, each) for row, each in enumerate(met)])

    def _by_blocks(self, layer: int, q: Tensor, k: Tensor, v: Tensor, index: IndexQueries | None) -> Tensor:
        spec, indexer = self.spec, self.spec.index
        assert indexer is not None
        keys, values = self.keys[layer].add(k), self.values[layer].add(v)
        made, width = [], spec.index_width
        for row, n in enumerate(range(len(keys) - len(q) + 1, len(keys) + 1)):
            groups = []
            for head, own in enumerate(q[row].split(spec.group)):
                seen = torch.ones(n, dtype=torch.bool)
                if index is not None:
                    seen = self._blocks(index.q[row, head], keys[:n, :, :width].flatten(1))
                k_met, v_met = (each[:n, head : head + 1, width:][seen] for each in (keys, values))
                groups.append(self.attend(layer, own[None], k_met, v_met)[0])
            made.append(torch.cat(groups))
        return torch.stack(made)

    def _blocks(self, q: Tensor, keys: Tensor) -> Tensor:
        """q [I], keys [n, I] -> bool [n]."""
        spec = self.spec.index
        assert spec is not None
        blocks = (keys.float() @ q.float()).split(spec.block)
        best = torch.tensor([float(each.max()) for each in blocks])
        best[max(0, len(blocks) - spec.local) :] = torch.inf
        chosen = best.argsort(descending=True, stable=True)[: spec.chosen // spec.block]
        kept = torch.zeros(len(blocks), dtype=torch.bool).index_fill(0, chosen, True)
        return kept.repeat_interleave(spec.block)[: len(keys)]

    def _choice(self, q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
        """q [N, I], weights [N], keys [n, I] -> bool [n]."""
        assert self.spec.index is not None
        scores = weights @ (q.float() @ keys.float().T).relu()
        best = scores.argsort(descending=True, stable=True)[: self.spec.index.chosen]
        return torch.zeros(len(keys), dtype=torch.bool).index_fill(0, best, True)

    def _pools(self, q: Tensor, weights: Tensor, stored: Tensor, places: Tensor) -> Tensor:
        """q [N, I], weights [N], stored [n, 2 I], places [pool, I] -> bool [n]."""
        assert self.spec.index is not None
        pool, whole = len(places), len(stored) // len(places)
        keys, counts = stored[: whole * pool].float().view(whole, pool, stored.shape[1]).chunk(2, dim=-1)
        keys = ((counts + places).softmax(1) * keys).sum(1)
        scores = weights @ (q.float() @ keys.T).relu()
        best = scores.argsort(descending=True, stable=True)[: self.spec.index.chosen // pool]
        kept = torch.zeros(whole, dtype=torch.bool).index_fill(0, best, True).repeat_interleave(pool)
        return torch.cat((kept, torch.ones(len(stored) - len(kept), dtype=torch.bool)))

    def attend(self, layer: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q [T, Hq, D] are the last T rows over keys and values [N, Hkv, D]: [T, Hq, D]."""
        rows, length, spec = len(q), len(keys), self.spec
        queries = q.float().transpose(0, 1)
        group = queries.shape[0] // keys.shape[1]
        keys = keys.float().transpose(0, 1).repeat_interleave(group, 0)
        values = values.float().transpose(0, 1).repeat_interleave(group, 0)
        scores = queries @ keys.transpose(1, 2) * spec.scale
        if spec.score_cap is not None:
            scores = torch.tanh(scores / spec.score_cap) * spec.score_cap
        if self.key_bias is not None:
            scores = scores + self.key_bias[:, None, :length]
        row = torch.arange(length - rows, length)[:, None]
        key = torch.arange(length)[None, :]
        visible = key <= row
        if spec.windows[layer] is not None:
            window = spec.windows[layer]
            visible &= key > row - window if window > 0 else key // -window == row // -window
        scores = scores.masked_fill(~visible, float("-inf"))
        if self.sinks is not None:
            sink = self.sinks[layer][:, None, None].expand(-1, rows, 1)
            return (torch.cat((scores, sink), -1).softmax(-1)[..., :-1] @ values).transpose(0, 1).to(q.dtype)
        return (scores.softmax(-1) @ values).transpose(0, 1).to(q.dtype)


class RowAttend(NaiveAttend):
    """The same, one row at a time: a row's bits cannot depend on how many rows came in its step."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        return torch.cat(
            [super(RowAttend, self).__call__(layer, q[i : i + 1], k[i : i + 1], v[i : i + 1]) for i in range(len(q))]
        )


class BatchAttend(Attend):
    """Attention of several sequences, each by an Attend of its own; `counts` are their rows in a step, in order."""

    def __init__(self, sequences: list[NaiveAttend], counts: list[int]) -> None:
        self.sequences = sequences
        self.counts = counts

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        parts = zip(self.sequences, q.split(self.counts), k.split(self.counts), v.split(self.counts), strict=True)
        return torch.cat([sequence(layer, *rows) for sequence, *rows in parts])

    def sparse(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, index: IndexQueries | None, rows: Tensor | None = None
    ) -> Tensor:
        every: list[IndexQueries] | list[None] = [None] * len(self.counts)
        if index is not None:
            starts = torch.tensor([0, *self.counts]).cumsum(0).tolist()
            every = [index.of(torch.arange(*ends)) for ends in pairwise(starts)]
        parts = zip(self.sequences, *(each.split(self.counts) for each in (q, k, v)), every, strict=True)
        return torch.cat([sequence.sparse(layer, *each) for sequence, *each in parts])


def naive(decoder: Decoder, kind: type[NaiveAttend] = NaiveAttend) -> NaiveAttend:
    """Attention for one new sequence of this model."""
    return kind(decoder.config.attention, decoder.key_bias, decoder.sinks)


def batch_of(tokens: list[int], start: int, prompt_length: int) -> TokenBatch:
    """Rows `start` onwards of one sequence whose prompt has `prompt_length` tokens."""
    positions = torch.arange(start, start + len(tokens))
    return TokenBatch(torch.tensor(tokens), positions, (positions + 1).clamp(min=prompt_length))


def join(batches: list[TokenBatch]) -> TokenBatch:
    """The rows of several sequences as one step."""
    lengths = [batch.rope_lengths for batch in batches]
    assert all(length is not None for length in lengths)
    return TokenBatch(
        torch.cat([batch.token_ids for batch in batches]),
        torch.cat([batch.positions for batch in batches]),
        torch.cat([length for length in lengths if length is not None]),
    )


def prompt_logits(decoder: Decoder, tokens: list[int]) -> Tensor:
    """Logits [T, V] at every position of a prompt."""
    return decoder.logits(decoder.forward(batch_of(tokens, 0, len(tokens)), naive(decoder)))
