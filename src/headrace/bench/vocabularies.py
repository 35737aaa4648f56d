"""A made-up tokenizer for the shapes with random weights: byte-level BPE whose tokens are all short words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase

from headrace.bench.shapes import SHAPES, checkpoint

SPECIAL = ("<unk>", "<s>", "</s>")


def with_tokenizer(model: str, folder: Path) -> Path:
    """`folder` becomes the shape's checkpoint with a tokenizer of as many tokens as it has logits."""
    for path in checkpoint(model).iterdir():
        (folder / path.name).symlink_to(path)
    write_tokenizer(SHAPES[model].vocab, folder)
    return folder


def write_tokenizer(size: int, folder: Path) -> None:
    """Tokenizer files of `size` tokens: the bytes, then words of two and three letters, with a space before and
    without."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(islice(_merges(), size - len(letters) - len(SPECIAL)))
    names = [*SPECIAL, *letters, *dict.fromkeys(one + other for one, other in merges)]
    made = Tokenizer(models.BPE({name: token for token, name in enumerate(names)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    made.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))


def _merges() -> Iterator[tuple[str, str]]:
    pairs = ["".join(pair) for pair in product(ascii_lowercase, repeat=2)]
    yield from ((pair[0], pair[1]) for pair in pairs)
    yield from (("Ġ", letter) for letter in ascii_lowercase)
    yield from (("Ġ", pair) for pair in pairs)
    yield from product(pairs, ascii_lowercase)
    yield from product(("Ġ",), ("".join(three) for three in product(ascii_lowercase, repeat=3)))
