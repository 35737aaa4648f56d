"""mistral.rs (its Python package) as an engine under test: weights quantised while they load (`isq`, its ISQ).

It takes text, not token ids. So the checkpoint gets, in a folder beside it, a tokenizer of as many words as there are
tokens: w7 is token 7, and what is sent are exactly the tokens asked for, as the first run checks. Prompts go in as
chats whose template is their text alone, since only chats are streamed; a thread for each reads its tokens. The
template and the splitting into words are part of its times.

Its option: isq, the form. Its prefix cache is on, as it comes; its PagedAttention needs a GPU.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from mistralrs import Architecture, ChatCompletionRequest, Runner, Which

from headrace.cli.bench_protocol import Times, serve

AT_ONCE = 64
"""Sequences that may run together: as many as the largest workload has."""


class MistralRs:
    """The runner in this process, which steps on threads of its own."""

    def __init__(self, checkpoint: Path, options: dict[str, Any]) -> None:
        folder = str(with_words(checkpoint))
        self.runner = Runner(
            Which.Plain(model_id=folder, arch=Architecture.Llama),
            max_seqs=AT_ONCE,
            in_situ_quant=options["isq"],
        )
        self.checked = False

    def run(self, prompts: list[list[int]], max_tokens: list[int]) -> Times:
        texts = [" ".join(f"w{token}" for token in prompt) for prompt in prompts]
        if not self.checked:
            self._check(texts[0], prompts[0])
        times: Times = [[] for _ in prompts]
        failures: list[BaseException] = []
        began = time.perf_counter()

        def ask(text: str, limit: int, row: list[float]) -> None:
            try:
                for chunk in self.runner.send_chat_completion_request(_request(text, limit)):
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
            raise failures[0]
        return times

    def _check(self, text: str, prompt: list[int]) -> None:
        found = self.runner.tokenize_text(text, add_special_tokens=False, enable_thinking=None)
        if list(found) != prompt:
            raise RuntimeError(f"mistral.rs reads {len(prompt)} tokens as {len(found)} others")
        self.checked = True


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
    # What transformers takes for granted, mistral.rs wants to read.
    (folder / "config.json").write_text(json.dumps({"hidden_act": "silu", "rope_theta": 10_000.0} | config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": False}))
    return folder


if __name__ == "__main__":
    serve(MistralRs, "mistralrs")
