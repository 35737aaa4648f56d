"""The tokenizer: byte-level BPE, digits one by one, each name of facts.NAMES one token, chat roles special tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB = 2304
BOS, END, PAD, SYSTEM, USER, ASSISTANT = SPECIAL = (
    "<|bos|>",
    "<|end|>",
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
)
MAX_POSITIONS = 16_384

# Pieces of every question and answer, wanted as one token each though the text has few or none of them.
WORDS = ["Ġcode", "The", "What", *(f"Ġ{digit}" for digit in range(10))]

# Words and single digits with the space before them, runs of marks, white space.
PIECES = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('roles are system, user and assistant, not ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], names: Iterable[str]) -> Tokenizer:
    """Deterministic: BPE over `texts`, then WORDS and the names appended as one token each.

    The words need no merges of their own: with `ignore_merges` a whole piece found in the vocabulary is taken as it is.
    """
    words = WORDS + ["Ġ" + name for name in names]
    tok = _untrained(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(words),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator(texts, trainer)
    return _with_words(tok, words)


def _untrained(model: models.Model) -> Tokenizer:
    tok = Tokenizer(model)
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    return tok


def _with_words(trained: Tokenizer, words: list[str]) -> Tokenizer:
    bpe = json.loads(trained.to_str())["model"]
    vocab: dict[str, int] = bpe["vocab"]
    for word in words:
        vocab.setdefault(word, len(vocab))
    merges = [tuple(pair) for pair in bpe["merges"]]
    tok = _untrained(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tok.add_special_tokens(list(SPECIAL))
    tok.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tok.token_to_id(BOS))]
    )
    return tok


def save_tokenizer(tok: Tokenizer, folder: Path) -> None:
    (folder / "tokenizer.json").write_text(tok.to_str(pretty=False), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
