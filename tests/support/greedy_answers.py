"""Whether an answer is the one that transformers decodes greedily, asked in one pass instead of token by token."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel


@torch.no_grad()
def greedy_behind(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> list[int]:
    """The tokens with the highest logits behind the prompt and behind each token of `answer` but the last: equal to
    `answer` if greedy decoding gives just that, by induction over its tokens.

    A model whose rotation changes with the length (dynamic NTK) keeps keys as they were rotated when they came, which
    one pass does not show: it decodes.
    """
    if "dynamic" in str(getattr(model.config, "rope_parameters", None)):
        return decoded(model, prompt, len(answer))
    logits = model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
    found: list[int] = logits.argmax(-1).tolist()
    return found


def decoded(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """`count` greedy tokens, one at a time."""
    rows = model.generate(  # type: ignore[operator]
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    found: list[int] = rows[0, len(prompt) :].tolist()
    return found
