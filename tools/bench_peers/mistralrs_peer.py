"""mistral.rs (its Python package) as an engine under test: bf16, weights quantised while they load (`isq`, its ISQ), or
a GGUF file.

It takes text, not token ids. So the checkpoint gets, in a folder beside it, a tokenizer of as many words as there are
tokens: w7 is token 7, and what is sent are exactly the tokens asked for, as the first run checks. Prompts go in as
chats whose template is their text alone, since only chats are streamed; a thread for each reads its tokens. The
template and the splitting into words are part of its times.

Options: gguf, the file; or isq, the form, none for bf16; head: whether the last layer, that gives the logits, is
quantised too. Where it is, 0.9.5 fails as soon as it computes several prompts of one length at once ("input tensor is
not contiguous"). The prefix cache is on, as it comes; PagedAttention needs a GPU.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from mistralrs import Architecture, ChatCompletionRequest, Runner, Which

from headrace.bench.protocol import Times, serve

AT_ONCE = 64
"""Sequences that may run together: as many as the largest workload has."""

IMPLIED = {
    "hidden_act": "silu",
    "rope_theta": 10_000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
"""What a config.json need not say, and mistral.rs wants to read."""


class MistralRs:
    """The runner in this process, which steps on threads of its own."""

    def __init__(self, checkpoint: Path, options: dict[str, Any]) -> None:
        folder, isq, file = with_words(checkpoint), options.get("isq"), options.get("gguf")
        head = options.get("head", True)
        topology = None if head else str(layers_alone(folder, isq))
        if file is not None:
            which = Which.GGUF(str(Path(file).parent), Path(file).name, tok_model_id=str(folder))
        else:
            which = Which.Plain(model_id=str(folder), arch=architecture(checkpoint), topology=topology)
        self.runner = Runner(which, max_seqs=AT_ONCE, in_situ_quant=isq if head else None)
        self.checked = False
        self.sending = threading.Lock()  # the runner is not to be asked from two threads at once

    def run(self, prompts: list[list[int]], max_tokens: list[int]) -> Times:
        texts = [" ".join(f"w{token}" for token in prompt) for prompt in prompts]
        if not self.checked:
            self._check(texts[0], prompts[0])
        times: Times = [[] for _ in prompts]
        failures: list[BaseException] = []
        began = time.perf_counter()

        def ask(text: str, limit: int, row: list[float]) -> None:
            try:
                with self.sending:
                    chunks = self.runner.send_chat_completion_request(_request(text, limit))
                for chunk in chunks:
                    if chunk.choices and chunk.choices[0].delta.content:
                        row.append(time.perf_counter() - began)
            except BaseException as error:
                failures.append(error)

        threads = [
            threading.Thread(target=ask, args=arguments) for arguments in zip(texts, max_tokens, times, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise RuntimeError(str(failures[0]).splitlines()[0])  # the rest is a backtrace
        return times

    def _check(self, text: str, prompt: list[int]) -> None:
        found = self.runner.tokenize_text(text, add_special_tokens=False, enable_thinking=None)
        if list(found) != prompt:
            raise RuntimeError(f"mistral.rs reads {len(prompt)} tokens as {len(found)} others")
        self.checked = True


def architecture(checkpoint: Path) -> Architecture:
    """Raises KeyError for models that mistral.rs has no text architecture for."""
    kinds = {"llama": Architecture.Llama, "qwen3_moe": Architecture.Qwen3Moe}
    return kinds[json.loads((checkpoint / "config.json").read_text())["model_type"]]


def _request(text: str, limit: int) -> ChatCompletionRequest:
    return ChatCompletionRequest(
        messages=[{"role": "user", "content": text}],
        model="default",
        max_tokens=limit,
        temperature=0.0,
        ignore_eos=True,
        stream=True,
    )


def with_words(checkpoint: Path) -> Path:
    """The checkpoint's files beside a tokenizer whose words are the tokens."""
    folder = checkpoint.with_name(checkpoint.name + "-words")
    folder.mkdir(exist_ok=True)
    if not (folder / "model.safetensors").exists():
        os.link(checkpoint / "model.safetensors", folder / "model.safetensors")
    config = json.loads((checkpoint / "config.json").read_text())
    vocabulary = {f"w{token}": token for token in range(config["vocab_size"])}
    words = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": level, "model": words,
    }  # fmt: skip
    settings = {"bos_token": "w1", "eos_token": "w2", "chat_template": "{{ messages[0]['content'] }}"}
    (folder / "config.json").write_text(json.dumps(IMPLIED | config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": False}))
    return folder


def layers_alone(folder: Path, isq: str) -> Path:
    """A file that has the model's layers quantised, and nothing else."""
    path = folder / "layers.yaml"
    count = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    path.write_text(f"0-{count}:\n  isq: {isq}\n")
    return path


if __name__ == "__main__":
    serve(MistralRs, "mistralrs")
