"""Decoding beside transformers compiled: a static cache, torch.compile, one CUDA graph a step. Compiling takes most of
the time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tools.gpu import timing
from tools.gpu.engine import SIZES, peer_figures, release
from tools.gpu.models import MODELS, transformers_model
from tools.gpu.peers import TransformersPeer
from tools.gpu.runner import Case, Row
from tools.gpu.sessions import drawn_tokens


def cases() -> Iterator[Case]:
    for name in ("S1", "8B"):
        peer = TransformersPeer(transformers_model(MODELS[name], timing.CUDA), compiled=True)
        for count, length in SIZES.contexts[:2]:
            yield Case(f"{name} decode {count}", partial(decode, name, peer, count, length))
        yield Case(f"{name} {SIZES.sharing} on {SIZES.shared} shared", partial(shared, name, peer))
        del peer.model, peer.step
        torch.compiler.reset()
        release()


def prompts(count: int, length: int) -> torch.Tensor:
    return torch.tensor([drawn_tokens(length) for _ in range(count)], device=timing.CUDA)


def decode(name: str, peer: TransformersPeer, count: int, length: int) -> Row:
    """Tokens a second, as in the engine's section of the model."""
    figures = peer_figures("compiled", count, partial(peer.run, prompts(count, length), 16))
    return Row(f"{name} decode {count} x {length:,}", figures)


def shared(name: str, peer: TransformersPeer) -> Row:
    """Sequences with copies of one prefix."""
    prefix, count = prompts(1, SIZES.shared), SIZES.sharing

    def run() -> tuple[list[float], Any]:
        return peer.run(prompts(count, SIZES.own), 16, peer.primed(prefix, count, SIZES.own + SIZES.decoded))

    return Row(f"{name} {count} on {SIZES.shared:,} shared", peer_figures("compiled", count, run))
