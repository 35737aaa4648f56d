"""llama.cpp (llama-cpp-python's low-level interface) as an engine under test.

Options: gguf, the file that is read; flash (flash attention on or off), kv_tokens;
extra: false for weights laid out as they are in the file, as llama.cpp's --no-repack does. On AMX, 0.3.36 of
llama-cpp-python ends at its first product of Q8_0 otherwise (a fault at ldtilecfg).
Prompts share by copying sequences in the unified cache, each from the earlier prompt it has most in common with, which
is more than llama.cpp's own server does; a single prompt goes on in the last one's sequence, behind what both begin
with, as the server's slots do (of recurrent states, behind all of it). KV is f16, its default.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import llama_cpp as ll
import numpy as np

from headrace.bench.protocol import Times, serve

SEQUENCES = 65
KEPT = SEQUENCES - 1
"""Sequence of the last single prompt, which later prompts may begin with."""
BATCH = 2048
LEAST_SHARED = 32


class LlamaCpp:
    """Greedy decoding in batches over one context."""

    def __init__(self, checkpoint: Path, options: dict[str, Any]) -> None:
        ll.llama_backend_init()
        loading = ll.llama_model_default_params()
        loading.use_extra_bufts = options.get("extra", True)
        model = ll.llama_model_load_from_file(options["gguf"].encode(), loading)
        if not model:
            raise RuntimeError(f"llama.cpp does not read {Path(options['gguf']).name}")
        params = ll.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = options["kv_tokens"], BATCH, 512
        params.n_seq_max, params.kv_unified = SEQUENCES, True
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        params.flash_attn_type = 1 if options["flash"] else 0
        self.context = ll.llama_init_from_model(model, params)
        if not self.context:
            raise RuntimeError("llama.cpp gave no context")
        self.facts = {"threads": str(params.n_threads), "compiled for": _features()}
        self.memory = ll.llama_get_memory(self.context)
        self.vocabulary = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
        self.batch = ll.llama_batch_init(BATCH, 0, 1)
        self.held: dict[int, list[int]] = {}

    def run(self, prompts: list[list[int]], max_tokens: list[int]) -> Times:
        began = time.perf_counter()
        self._keep(prompts)
        slots = [KEPT] if len(prompts) == 1 else list(range(len(prompts)))
        times: Times = [[] for _ in prompts]
        latest = []
        for slot, prompt, row in zip(slots, prompts, times, strict=True):
            latest.append(self._prefill(slot, prompt))
            row.append(time.perf_counter() - began)
        while active := [i for i, row in enumerate(times) if len(row) < max_tokens[i]]:
            entries = [(latest[i], len(prompts[i]) + len(times[i]) - 1, slots[i], True) for i in active]
            for i, token in zip(active, self._decode(entries), strict=True):
                latest[i] = token
                times[i].append(time.perf_counter() - began)
        if len(prompts) == 1:
            ll.llama_memory_seq_rm(self.memory, KEPT, len(prompts[0]), -1)
        return times

    def _keep(self, prompts: list[list[int]]) -> None:
        """Forgets all sequences but the kept one, and that too unless the prompts begin with it. Of the kept one
        a single prompt takes what both begin with."""
        kept = self.held.get(KEPT)
        if kept is not None and len(prompts) == 1 and (common := _common(kept, prompts[0])) >= LEAST_SHARED:
            kept = kept[:common] if ll.llama_memory_seq_rm(self.memory, KEPT, common, -1) else kept
        if kept is None or any(len(p) <= len(kept) or p[: len(kept)] != kept for p in prompts):
            ll.llama_memory_clear(self.memory, False)
            self.held = {}
            return
        for slot in set(self.held) - {KEPT}:
            ll.llama_memory_seq_rm(self.memory, slot, -1, -1)
        self.held = {KEPT: kept}

    def _prefill(self, slot: int, prompt: list[int]) -> int:
        """Computes a prompt, copying what an earlier one has computed; the first token of its answer."""
        start, source = max(((_common(tokens, prompt), other) for other, tokens in self.held.items()), default=(0, 0))
        start = start if start >= LEAST_SHARED else 0
        if start and source != slot:
            ll.llama_memory_seq_cp(self.memory, source, slot, 0, start)
        self.held[slot] = prompt
        token = 0
        for first in range(start, len(prompt), BATCH):
            part = prompt[first : first + BATCH]
            ends = first + len(part) == len(prompt)
            entries = [(t, first + i, slot, ends and i == len(part) - 1) for i, t in enumerate(part)]
            tokens = self._decode(entries)
            token = tokens[0] if tokens else 0
        return token

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """Computes (token, position, sequence, wants logits); the greedy successor of each that wants logits."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for index, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[index], batch.pos[index], batch.logits[index] = token, position, wanted
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
        status = ll.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode gave {status}")
        return [self._greedy(index) for index, entry in enumerate(entries) if entry[3]]

    def _greedy(self, index: int) -> int:
        row = ll.llama_get_logits_ith(self.context, index)
        address = ctypes.cast(row, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(address, shape=(self.vocabulary,)).argmax())


def _features() -> str:
    """The instruction sets and libraries that it was compiled with, as it says itself."""
    entries = ll.llama_print_system_info().decode().replace(":", "|").split("|")
    return " ".join(entry.split("=")[0].strip() for entry in entries if entry.strip().endswith("= 1"))


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common beginning, short of the whole of b."""
    limit = min(len(a), len(b) - 1)
    same = np.array(a[:limit]) == np.array(b[:limit])
    return limit if same.all() else int(same.argmin())


if __name__ == "__main__":
    serve(LlamaCpp, "llama-cpp-python")
