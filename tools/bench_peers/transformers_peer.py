"""transformers as an engine under test: sdpa attention, bf16, static batches, the usual way to reuse a prefix.

The cache of the last single prompt is kept; a batch whose prompts all begin with it takes it over, repeated per row, as
transformers' own guide to prefix caching does. Prompts of unequal length are padded on the left. Options: device;
static: a cache of fixed length, which is never reused; compiled: steps of one token by torch.compile, with it.
"""

from __future__ import annotations

import copy
import time
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from headrace.bench.protocol import Times, serve


class Transformers:
    """Greedy decoding by the model's own forward; generate() would add to every step."""

    def __init__(self, checkpoint: Path, options: dict[str, Any]) -> None:
        load = AutoModelForCausalLM.from_pretrained
        self.device = options.get("device", "cpu")
        self.model = load(checkpoint, dtype=torch.bfloat16, attn_implementation="sdpa").eval().to(self.device)
        compiled = options.get("compiled", False)
        self.static = options.get("static", False) or compiled
        self.decode = torch.compile(self.model.forward, mode="reduce-overhead") if compiled else self.model.forward
        named = signature(self.model.forward).parameters
        self.cache_name = "cache" if "cache" in named else "past_key_values"  # versions of transformers differ
        self.known: list[int] = []
        self.cache: DynamicCache | None = None
        self.facts = {"threads": str(torch.get_num_threads())}

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], max_tokens: list[int]) -> Times:
        began = time.perf_counter()
        cache, skipped = self._static(prompts, max_tokens) if self.static else self._reuse(prompts)
        rows = [prompt[skipped:] for prompt in prompts]
        width = max(map(len, rows))
        tokens = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=self.device)
        mask = torch.tensor(
            [[1] * skipped + [0] * (width - len(row)) + [1] * len(row) for row in rows], device=self.device
        )
        times: Times = [[] for _ in prompts]
        for step in range(max(max_tokens)):
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            forward = self.decode if step else self.model.forward
            out = forward(
                input_ids=tokens, attention_mask=mask, position_ids=positions, logits_to_keep=1,
                **{self.cache_name: cache},
            )  # fmt: skip
            tokens = out.logits[:, -1].argmax(-1, keepdim=True)
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            tokens.cpu()  # a GPU has the token only then
            now = time.perf_counter() - began
            for row, limit in zip(times, max_tokens, strict=True):
                if step < limit:
                    row.append(now)
        if len(prompts) == 1 and not self.static:
            if max_tokens[0] > 1:
                cache.crop(1 - max_tokens[0])
            self.known, self.cache = prompts[0], cache
        return times

    def _static(self, prompts: list[list[int]], max_tokens: list[int]) -> tuple[StaticCache, int]:
        """An empty cache with room for all of it."""
        length = max(map(len, prompts)) + max(max_tokens)
        return StaticCache(config=self.model.config, max_cache_len=-(-length // 64) * 64), 0

    def _reuse(self, prompts: list[list[int]]) -> tuple[DynamicCache, int]:
        """(cache to go on from, tokens that are in it)."""
        count = len(self.known)
        if self.cache is None or any(len(p) <= count or p[:count] != self.known for p in prompts):
            return DynamicCache(config=self.model.config), 0
        cache = copy.deepcopy(self.cache)
        cache.batch_repeat_interleave(len(prompts))
        return cache, count


if __name__ == "__main__":
    serve(Transformers, "transformers", "torch")
