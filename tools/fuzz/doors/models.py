"""Model folders whose files somebody has damaged, edited or replaced: read as they were, or refused with the file's
name; never with another kind of error, and never by taking the memory that a number in them asks for."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from random import Random

import torch
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM, logging

from headrace.assets import __file__ as assets
from headrace.engine.tokenizer import Tokenizer
from headrace.models.config import read_config
from headrace.models.rope import Rope
from headrace.models.weights import load_weights
from headrace.types import UnsupportedModel
from tools.fuzz.doors import Door
from tools.fuzz.mutate import damaged, dumped, edited, nested, odd

ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
INDEX = "model.safetensors.index.json"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def door() -> Door:
    return Models()


class Models:
    memory_mib = 384
    case_s = 30.0

    def open(self, folder: Path) -> None:
        logging.set_verbosity_error()
        self._root, self._work = folder / "sound", folder / "model"
        sizes = dict(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
        llama = LlamaConfig(
            **sizes, intermediate_size=64, num_key_value_heads=2, max_position_embeddings=256, rope_parameters=ROPE
        )
        opt = OPTConfig(**sizes, ffn_dim=64, max_position_embeddings=64, word_embed_proj_dim=64)
        LlamaForCausalLM(llama).save_pretrained(self._root / "llama", max_shard_size="40KB")
        OPTForCausalLM(opt).save_pretrained(self._root / "opt")
        for name in TOKENIZER:
            if (path := Path(assets).parent / "tiny" / name).is_file():
                shutil.copy(path, self._root / "opt")
        for name in ("llama", "opt"):
            self._load(self._root / name, True)

    def case(self, rng: Random) -> str:
        shutil.rmtree(self._work, ignore_errors=True)
        shutil.copytree(self._root / rng.choice(("llama", "opt")), self._work)
        path = rng.choice(sorted(self._work.iterdir()))
        if path.name not in TOKENIZER and rng.random() < 0.5:
            path = self._work / "config.json"
        self._attack(path, rng)
        try:
            self._load(self._work, path.name in TOKENIZER)
        except (ValueError, UnsupportedModel, FileNotFoundError) as error:
            assert str(self._work) in str(error), f"says nothing of the folder: {error!r}"
            assert len(str(error)) < 4000, "an error without end"
            return f"{path.suffix} refused"
        return f"{path.suffix} loaded"

    def _load(self, folder: Path, tokenizer: bool) -> None:
        if tokenizer and (made := Tokenizer.load(folder)) is not None:
            made.encode("the quick fox")
            return
        config = read_config(folder)
        weights = load_weights(folder, config, torch.bfloat16)
        assert all(torch.isfinite(weight).all() for weight in weights.values())
        if config.rope is not None:
            Rope(config.rope, config.attention.head_dim).table(torch.arange(8))

    def _attack(self, path: Path, rng: Random) -> None:
        kind = rng.randrange(10)
        if kind == 0:
            path.unlink()
            rng.choice((os.mkfifo, Path.mkdir, lambda at: at.symlink_to("/dev/zero"), lambda at: None))(path)
        elif kind == 1 and path.suffix == ".json":
            path.write_text(rng.choice((dumped(odd(rng)), dumped(nested(500)), "[" * 100_000)))
        elif kind <= 6 and path.suffix == ".json":
            path.write_text(dumped(edited(json.loads(path.read_text()), rng)))
        elif kind <= 6 and path.suffix == ".safetensors":
            self._edit_header(path, rng)
        else:
            path.write_bytes(damaged(path.read_bytes(), rng))

    def _edit_header(self, path: Path, rng: Random) -> None:
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        text = dumped(edited(json.loads(data[8:end]), rng)).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])

    def close(self) -> None:
        pass
