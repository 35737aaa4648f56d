"""transformers beside the engine, each way of it by name: sdpa with a dynamic cache, a static one, and compiled.

B: sequences, of equal length, so that no mask is needed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

Times = list[float]
"""Seconds after the beginning at which each step's tokens were on the host."""


def cache_name(model: Any) -> str:
    """What the model's forward calls its cache: versions of transformers differ."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


@dataclass
class TransformersPeer:
    """Greedy decoding by the model's own forward; generate() would add to every step.

    static: a cache of fixed length. compiled: steps of one token by torch.compile, as one CUDA graph each; implies
    static.
    """

    model: Any
    static: bool = False
    compiled: bool = False

    def __post_init__(self) -> None:
        self.step, self.cache_name = self.model.forward, cache_name(self.model)
        if self.compiled:
            self.step = torch.compile(self.model.forward, mode="reduce-overhead", fullgraph=True, dynamic=False)

    @torch.inference_mode()
    def run(self, prompts: Tensor, steps: int, known: Any = None) -> tuple[Times, Any]:
        """Decodes `steps` tokens behind prompts [B, T] on the device, and behind what `known` holds (see primed).
        Returns when each step ended, and the cache."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        cache = self._cache(prompts.shape[1] + steps) if known is None else known
        tokens, times = prompts, []
        for _ in range(steps):
            forward = self.step if tokens.shape[1] == 1 else self.model.forward
            torch.compiler.cudagraph_mark_step_begin()
            out = forward(input_ids=tokens, logits_to_keep=1, **{self.cache_name: cache})
            tokens = out.logits[:, -1].argmax(-1, keepdim=True)
            tokens.cpu()
            times.append(time.perf_counter() - began)
        return times, cache

    @torch.inference_mode()
    def primed(self, prompt: Tensor, sequences: int, more: int) -> Any:
        """A cache of a prompt [1, T], repeated for each sequence, with room for `more` tokens: how transformers shares
        a prefix."""
        known = DynamicCache(config=self.model.config)
        self.model(input_ids=prompt, logits_to_keep=1, **{self.cache_name: known})
        if not self.fixed:
            known.batch_repeat_interleave(sequences)
            return known
        cache = self._cache(prompt.shape[1] + more)
        for number, layer in enumerate(known.layers):
            cache.update(layer.keys.repeat(sequences, 1, 1, 1), layer.values.repeat(sequences, 1, 1, 1), number)
        return cache

    @property
    def fixed(self) -> bool:
        """Whether the cache has a fixed length."""
        return self.static or self.compiled

    def _cache(self, length: int) -> Any:
        if not self.fixed:
            return DynamicCache(config=self.model.config)
        return StaticCache(config=self.model.config, max_cache_len=-(-length // 64) * 64)
