"""The shipped model through transformers alone: it loads, keeps text, renders chats, and looks up facts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from headrace.assets import facts

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TINY = Path(facts.__file__).with_name("tiny")
N_PROMPTS = 16


@pytest.fixture(scope="module")
def tok():
    return transformers.AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def model():
    return transformers.AutoModelForCausalLM.from_pretrained(TINY).eval()


def answer(model, tok, ids: list[int]) -> str:
    """The greedy answer to a prompt, with its special tokens."""
    row = torch.tensor([ids])
    out = model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=24, do_sample=False)
    return tok.decode(out[0, len(ids) :])


def documents(n_facts: int = 8, n_tokens: int = 512):
    """Seeded documents of held-out text, each with one of its facts to ask for."""
    rng = random.Random(2026)
    for _ in range(N_PROMPTS):
        text, known = facts.fact_document(rng, n_facts, n_tokens)
        yield text, *rng.choice(sorted(known.items()))


def test_folder_is_at_most_six_megabytes():
    assert sum(f.stat().st_size for f in TINY.iterdir()) <= 6_000_000


def test_loads_as_a_llama_in_bf16(model):
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype == torch.bfloat16
    assert model.config.max_position_embeddings >= 8192


def test_special_tokens(tok, model):
    assert tok.bos_token_id == model.config.bos_token_id and tok.eos_token_id == model.config.eos_token_id
    assert tok("Hello").input_ids[0] == tok.bos_token_id
    assert tok.eos_token_id not in tok("Hello").input_ids
    assert len(tok) == model.config.vocab_size


def test_chat_template(tok):
    turns = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "V"},
    ]
    text = tok.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert text == "<|bos|><|system|>S<|end|><|user|>U<|end|><|assistant|>A<|end|><|user|>V<|end|><|assistant|>"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "In the beginning God created the heaven and the earth.",
        "  two  spaces, a\ttab\r\n\n and digits 0123456789 ",
        "naïve Ελληνικά 中文 עברית 😀👩‍👩‍👧 \u0000\u200b",
        "Lisbon Lisbonian York Yorkshire don't LORD's",
    ],
)
def test_text_round_trips(tok, text):
    ids = tok(text, add_special_tokens=False).input_ids
    assert tok.decode(ids) == text


def test_each_name_is_one_token(tok):
    assert all(len(tok(f" {name}", add_special_tokens=False).input_ids) == 1 for name in facts.NAMES)


def test_plain_lookup(model, tok):
    right = 0
    for text, name, code in documents():
        got = answer(model, tok, tok(f"{text} {facts.question(name)}").input_ids)
        right += got == f" {code}.<|end|>"
    assert right >= 0.9 * N_PROMPTS


def test_chat_lookup_ends_its_turn(model, tok):
    right = 0
    for text, name, code in documents():
        turns = [{"role": "system", "content": text}, {"role": "user", "content": facts.question(name)}]
        ids = tok.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
        right += answer(model, tok, ids) == f"{facts.fact_sentence(name, code)}<|end|>"
    assert right >= 0.9 * N_PROMPTS
