"""The training loop: stages of growing length, Muon for the matrices, AdamW for the rest."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from .tasks import Mix, Writer

JUMP = 8_192  # the furthest a position may jump: distances of long prompts, learned on short ones


@dataclass(frozen=True)
class Stage:
    length: int
    batch: int
    steps: int
    mix: Mix
    jumps: float = 0.25  # share of sequences with one random jump in their positions


STAGES = (
    Stage(128, 32, 120, Mix(text=0.25, chat=0.35, single=0.5, max_facts=4)),
    Stage(256, 16, 200, Mix(text=0.25, chat=0.35, single=0.3, max_facts=6)),
    Stage(256, 16, 350, Mix(text=0.3, chat=0.35, max_facts=10)),
    Stage(1024, 4, 650, Mix(text=0.35, chat=0.3, max_facts=40, first=6)),
    Stage(4096, 1, 220, Mix(text=0.2, chat=0.4, max_facts=80, first=6)),
)
WARMUP, DECAY = 30, 0.35  # steps; share of all steps in which the rate falls to nothing


def rate(step: int, total: int) -> float:
    return min((step + 1) / WARMUP, 1.0, (total - step) / (DECAY * total))


def optimizers(model: LlamaForCausalLM, muon: float, adam: float) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=muon, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=adam, weight_decay=0.0, betas=(0.9, 0.98)),
    ]


def positions(rng: random.Random, stage: Stage) -> Tensor:
    """[batch, length]: 0, 1, 2 ..., in some rows with one jump."""
    rows = torch.arange(stage.length).repeat(stage.batch, 1)
    for row in rows:
        if rng.random() < stage.jumps:
            row[rng.randrange(1, stage.length) :] += rng.randrange(JUMP - stage.length)
    return rows


def batch(writer: Writer, stage: Stage) -> tuple[Tensor, Tensor, Tensor]:
    drafts = [writer.sequence(stage.length, stage.mix) for _ in range(stage.batch)]
    ids = torch.tensor([d.ids for d in drafts])
    weights = torch.tensor([d.weights for d in drafts])
    return ids, weights, positions(writer.rng, stage)


def loss_of(model: LlamaForCausalLM, ids: Tensor, weights: Tensor, where: Tensor) -> Tensor:
    """Weighted mean; logits only where a weight stands."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=ids, position_ids=where, use_cache=False).last_hidden_state
        keep = weights[:, 1:] > 0
        logits = model.lm_head(hidden[:, :-1][keep])
    each = cross_entropy(logits.float(), ids[:, 1:][keep], reduction="none")
    kept = weights[:, 1:][keep]
    return (each * kept).sum() / kept.sum()


def train(
    model: LlamaForCausalLM,
    writer: Writer,
    stages: tuple[Stage, ...],
    after_stage: Callable[[int], None],
    muon: float = 3e-3,
    adam: float = 2e-3,
) -> None:
    total, step = sum(s.steps for s in stages), 0
    opts = optimizers(model, muon, adam)
    groups = [(group, group["lr"]) for opt in opts for group in opt.param_groups]
    for number, stage in enumerate(stages, 1):
        progress = Progress(number, stage)
        for _ in range(stage.steps):
            for group, lr in groups:
                group["lr"] = lr * rate(step, total)
            progress.add(one_step(model, opts, batch(writer, stage)))
            step += 1
        after_stage(number)


def one_step(model: LlamaForCausalLM, opts: list[torch.optim.Optimizer], data: tuple[Tensor, Tensor, Tensor]) -> float:
    loss = loss_of(model, *data)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for opt in opts:
        opt.step()
        opt.zero_grad(set_to_none=True)
    return loss.item()


class Progress:
    """Prints a line every 50 steps of a stage."""

    def __init__(self, number: int, stage: Stage) -> None:
        self.number, self.stage, self.began = number, stage, time.monotonic()
        self.losses: list[float] = []

    def add(self, loss: float) -> None:
        self.losses.append(loss)
        done = len(self.losses)
        if done % 50 == 0 or done == self.stage.steps:
            recent, seconds = self.losses[-50:], time.monotonic() - self.began
            speed = done * self.stage.length * self.stage.batch / seconds
            print(
                f"stage {self.number} ({self.stage.length} x {self.stage.batch}) step {done}/{self.stage.steps}: "
                f"loss {sum(recent) / len(recent):.3f}, {speed:,.0f} tokens/s",
                flush=True,
            )
