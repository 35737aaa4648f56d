"""Small tokenizers of each kind, built here with the tokenizers library."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

CORPUS = ["the quick brown fox jumps over the lazy dog", "naïve café 你好 世界 👩‍👩‍👧 hello world, hello there"] * 5
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if messages[-1].tool_calls %}[{{ messages[-1].tool_calls | length }}]{% endif %}"
    "{% if tools %}{{ tools | length }}{% endif %}{% if shout %}!{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=SPECIAL)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool>", special=False), AddedToken("｜é｜", special=False)])
    return backend


def byte_fallback(strip: bool = True, mark: str | Regex = "▁") -> Backend:
    """As the first Llama: space mark, and bytes for what the vocabulary lacks; `strip` drops the text's first space."""
    vocab = {token: i for i, token in enumerate(["<unk>", *SPECIAL, *(f"<0x{b:02X}>" for b in range(256))])}
    for piece in ("▁", *"theloworldaé", "th", "▁th", "▁the", "lo", "▁▁"):
        vocab.setdefault(piece, len(vocab))
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("l", "o"), ("▁", "▁")]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace(mark, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens(SPECIAL)
    return backend


def metaspace() -> Backend:
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>")
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def word_piece() -> Backend:
    """A kind whose tokens cannot be decoded one by one: spaces stand between words, and are tidied."""
    words = ["the", "quick", "fox", "jump", "##s", "##ed", ",", ".", "hello", "world"]
    backend = Backend(models.WordPiece({t: i for i, t in enumerate(["[UNK]", *SPECIAL, *words])}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(SPECIAL)
    return backend


KINDS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "byte_fallback_no_strip": lambda: byte_fallback(strip=False),
    "byte_fallback_in_windows": lambda: byte_fallback(mark=Regex("▁")),
    "metaspace": metaspace,
    "word_piece": word_piece,
}


def save(backend: Backend, folder: Path, template: str | None = TEMPLATE, add_bos: bool = True) -> Path:
    if add_bos:
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", _id(backend, "<s>"))])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    wrapped.chat_template = template
    wrapped.save_pretrained(folder)
    return folder


def _id(backend: Backend, token: str) -> int:
    number = backend.token_to_id(token)
    assert number is not None
    return number
