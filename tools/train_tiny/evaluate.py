"""Figures of a trained model: bits per byte of held-out text, and lookup accuracy by prompt length and facts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from . import vocab
from .tasks import Draft, Mix, Writer

LENGTHS, COUNTS = (256, 1024, 4096, 8192), (1, 8, 64)
PROMPT_TOKENS = 200_000  # of all prompts behind one figure, at most
WINDOW, FRESH = 1024, 512  # each window predicts its last FRESH tokens from at least WINDOW - FRESH before them


@torch.inference_mode()
def bits_per_byte(model: LlamaForCausalLM, writer: Writer) -> float:
    """Of the writer's text. Every token is predicted once."""
    bos, ids = writer.special[vocab.BOS], writer.text
    nats = 0.0
    for begin in range(0, len(ids), FRESH):
        left = max(0, begin - (WINDOW - FRESH))
        row = torch.tensor([bos, *ids[left : begin + FRESH]])
        n = len(ids[begin : begin + FRESH])
        logits = model(row[None, :-1]).logits[0, -n:].float()
        nats += cross_entropy(logits, row[-n:], reduction="sum").item()
    return nats / math.log(2) / len(writer.tok.decode(ids).encode())


def prompt(writer: Writer, length: int, n_facts: int, chat: bool, rare: bool = False) -> tuple[Draft, int]:
    """One prompt of exactly `length` tokens with its right answer behind it, and the number of answer tokens.

    Plain: the answer is ' 4821'. Chat: it is 'The code of Lisbon is 4821.' and the end of the turn.
    """
    known = writer.draw_facts(n_facts, rare)
    name = writer.rng.choice(list(known))
    tail, mix = Draft(), Mix(text=0, chat=0)
    (writer.ask_in_chat if chat else writer.ask)(tail, name, known[name], mix)
    n_answer = sum(w > 0 for w in tail.weights)
    before = [vocab.BOS] + [vocab.SYSTEM] * chat
    return writer.assemble(length + n_answer, known, tail, before, [vocab.END] * chat), n_answer


def fits(length: int, n_facts: int) -> bool:
    return n_facts * 11 + 40 <= length


@torch.inference_mode()
def accuracy(
    model: LlamaForCausalLM, writer: Writer, length: int, n_facts: int, chat: bool, n: int, rare: bool = False
) -> float | None:
    """Share of prompts whose whole greedy answer is right.

    The right answer is given and each of its tokens must be the likeliest: greedy decoding then produces just it. None
    where the facts do not fit the length.
    """
    if not fits(length, n_facts):
        return None
    right = 0
    for _ in range(n):
        draft, answer = prompt(writer, length, n_facts, chat, rare)
        ids = torch.tensor(draft.ids)
        guess = model(ids[None, :-1], logits_to_keep=answer).logits[0].argmax(-1)
        right += bool((guess == ids[-answer:]).all())
    return right / n


def measure(folder: Path, held_out: Sequence[str], most: int, seed: int) -> dict[str, Any]:
    """All figures of the model in `folder`, in bf16 as it is shipped, on text it has not seen."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    writer = Writer(Tokenizer.from_file(str(folder / "tokenizer.json")), held_out, seed)
    bits = round(bits_per_byte(model, writer), 3)
    print(f"{bits} bits per byte on held-out text", flush=True)
    n = {length: min(most, PROMPT_TOKENS // length) for length in LENGTHS}
    table: dict[str, list[float | None]] = {}
    for form, length in ((form, length) for form in ("plain", "chat") for length in LENGTHS):
        cells = [accuracy(model, writer, length, k, form == "chat", n[length]) for k in COUNTS]
        table[f"{form}, {length:,}"] = cells
        print(f"{form}, {length:,} tokens: {dict(zip(COUNTS, cells, strict=True))}", flush=True)
    rare = {length: accuracy(model, writer, length, 8, False, n[length], rare=True) for length in LENGTHS[:3]}
    return {"bits_per_byte": bits, "prompts": n, "accuracy": table, "names_of_several_tokens_8_facts": rare}


def markdown(figures: dict[str, Any]) -> str:
    lines = [
        "| form, tokens | " + " | ".join(f"{k} fact{'s' * (k > 1)}" for k in COUNTS) + " |",
        "|---" * (len(COUNTS) + 1) + "|",
    ]
    for label, cells in figures["accuracy"].items():
        lines.append(f"| {label} | " + " | ".join("does not fit" if c is None else f"{c:.2f}" for c in cells) + " |")
    return "\n".join(lines)
