"""GGUF files that somebody has damaged or edited: read as they were, or refused with the file's name; never with any
other kind of error, and never by taking the memory that a number in them asks for."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants

from headrace.engine.tokenizer import Tokenizer
from headrace.models.config import read_config
from headrace.models.decoder import load_decoder
from headrace.types import UnsupportedModel
from tests.support.gguf_families import write_family
from tools.fuzz.doors import Door
from tools.fuzz.mutate import EDGES, damaged

WIDE, INNER, VOCABULARY, EXPERTS = 64, 96, 64, 4
HEADER = 4096
"""Bytes in which the header of the small file lies, most of it."""
FAMILIES = ("gemma3", "phi4_longrope", "falcon40", "qwen3_5")
"""Kinds whose files have more to read than Llama's: one case in four attacks such a file."""


def door() -> Door:
    return Gguf()


class Gguf:
    memory_mib = 384
    case_s = 30.0

    def open(self, folder: Path) -> None:
        self._path = folder / "m.gguf"
        self._sound: list[bytes] = []
        for experts in (0, EXPERTS):
            _write(self._path, experts)
            self._load()
            self._sound.append(self._path.read_bytes())
        self._others: list[bytes] = []
        for kind in FAMILIES:
            write_family(kind, self._path, lambda _: GGMLQuantizationType.Q8_0)
            self._load()
            self._others.append(self._path.read_bytes())

    def case(self, rng: Random) -> str:
        sound = rng.choice(self._others if rng.random() < 0.25 else self._sound)
        self._path.write_bytes(self._attacked(sound, rng))
        try:
            self._load()
        except (ValueError, UnsupportedModel) as error:
            assert str(self._path) in str(error), f"says nothing of the file: {error!r}"
            assert len(str(error)) < 4000, "an error without end"
            return "refused"
        return "loaded"

    def _attacked(self, sound: bytes, rng: Random) -> bytes:
        if rng.random() < 0.3:
            return damaged(sound, rng)
        out = bytearray(sound)
        for _ in range(rng.choice((1, 1, 2))):  # a number of the header is another one
            size = rng.choice((4, 8))
            at = rng.randrange(HEADER)
            out[at : at + size] = (rng.choice(EDGES) % 2**64).to_bytes(8, "little")[:size]
        return bytes(out)

    def _load(self) -> None:
        config = read_config(self._path)
        decoder = load_decoder(self._path, "bfloat16")
        assert decoder.config.vocab_size == config.vocab_size
        if (made := Tokenizer.load(self._path)) is not None:
            made.encode("the quick fox")

    def close(self) -> None:
        pass


def _write(path: Path, experts: int) -> None:
    """A llama of one layer, with so many experts if any."""
    writer, made = GGUFWriter(str(path), "llama"), np.random.default_rng(1)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDE)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    single = [chr(0x100 + i) if i < 33 else chr(i + 31) for i in range(VOCABULARY - 1)]
    writer.add_token_list([*single, "AB"])
    writer.add_token_merges(["A B"])
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCABULARY, WIDE), "output": (VOCABULARY, WIDE)}
    shapes |= {f"blk.0.{name}": (WIDE, WIDE) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
    mlp = {"ffn_gate": (INNER, WIDE), "ffn_up": (INNER, WIDE), "ffn_down": (WIDE, INNER)}
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
        shapes |= {"blk.0.ffn_gate_inp": (experts, WIDE)}
        shapes |= {f"blk.0.{name}_exps": (experts, *shape) for name, shape in mlp.items()}
    else:
        shapes |= {f"blk.0.{name}": shape for name, shape in mlp.items()}
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDE, np.float32))
    kinds = (GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0, GGMLQuantizationType.MXFP4)
    for number, (name, shape) in enumerate(shapes.items()):
        kind = kinds[number % len(kinds)]
        value = made.standard_normal(shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
