"""EleutherAI's evaluation harness over both routes, on tasks and data of our own (tools/clients/tasks)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from tools.clients.servers import PYTHON, ROOT, Server, start
from tools.clients.tests.shapes import MODEL

TOLERANCE = 1e-4
"""Of an option's log likelihood. Both compute in float32, with other orders of sums: logits of up to 30 are off by
about 1e-6 of themselves, in up to 10 tokens of an option. 3e-5 was seen; options are 8e-3 apart or more."""
FIGURES = ("acc,none", "acc_norm,none")


@pytest.fixture(scope="module")
def tasks() -> TaskManager:
    os.chdir(ROOT)  # the tasks name their data from there
    return TaskManager(include_path=str(ROOT / "tools/clients/tasks"), include_defaults=False)


def evaluated(server: Server, tasks: TaskManager, model: str, task: str, **more: Any) -> dict[str, Any]:
    chat = model == "local-chat-completions"
    path = "chat/completions" if chat else "completions"
    told = {
        "model": MODEL, "base_url": f"{server.base}/{path}", "num_concurrent": 2, "max_retries": 1,
        "tokenizer_backend": "None" if chat else "remote", "tokenized_requests": not chat, "add_bos_token": not chat,
    }  # fmt: skip
    made: dict[str, Any] = simple_evaluate(
        model, model_args={**told, **more}, tasks=[task], task_manager=tasks, apply_chat_template=chat
    )
    return made


def figure(server: Server, tasks: TaskManager, model: str, task: str, metric: str) -> float:
    value: float = evaluated(server, tasks, model, task)["results"][task][f"{metric},none"]
    return value


def test_chat(real: Server, tasks: TaskManager) -> None:
    assert figure(real, tasks, "local-chat-completions", "codes", "exact_match") == 1.0


def test_completions(real: Server, tasks: TaskManager) -> None:
    assert figure(real, tasks, "local-completions", "codes", "exact_match") > 0.5


def test_log_likelihoods(real: Server, tasks: TaskManager) -> None:
    """By echo and logprobs of the prompt, with max_tokens of 1 or 0."""
    assert figure(real, tasks, "local-completions", "codes_chosen", "acc") == 1.0


def test_perplexity(real: Server, tasks: TaskManager) -> None:
    assert 1 < figure(real, tasks, "local-completions", "codes_rolling", "word_perplexity") < 1e6


# ---- the same figures as transformers --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The shipped model in float32."""
    server = start(tmp_path_factory.mktemp("exact"), "real", "--dtype", "float32")
    try:
        yield server.wait()
    finally:
        server.stop()


class Transformers(LM):
    """transformers in a process of its own (tools/clients/likelihoods.py), in place of lm-eval's `hf`, which would need
    torch in this one."""

    def __init__(self, folder: str, *options: str) -> None:
        super().__init__()
        self.command = [str(PYTHON), str(ROOT / "tools/clients/likelihoods.py"), folder, *options]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        given = json.dumps([request.args for request in requests])
        done = subprocess.run(self.command, input=given, capture_output=True, text=True, check=True)
        return [tuple(each) for each in json.loads(done.stdout)]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        raise NotImplementedError

    def generate_until(self, requests: list[Instance]) -> list[str]:
        raise NotImplementedError


@pytest.mark.parametrize("tokenizer", ["of-the-folder", "remote"])
def test_multiple_choice_agrees_with_transformers(exact: Server, tasks: TaskManager, tokenizer: str) -> None:
    """The remote tokenizer of lm-eval leaves out special tokens, whatever add_bos_token says."""
    folder = str(exact.log.parent / "model")
    remote = tokenizer == "remote"
    told = {"batch_size": 1} if remote else {"batch_size": 8, "tokenizer": folder, "tokenizer_backend": "huggingface"}
    ours = evaluated(exact, tasks, "local-completions", "choices", **told)
    model = Transformers(folder, *["no-bos"] * remote)
    theirs = simple_evaluate(model, tasks=["choices"], task_manager=tasks)
    assert {key: ours["results"]["choices"][key] for key in FIGURES} == {
        key: theirs["results"]["choices"][key] for key in FIGURES
    }
    assert 0.5 < ours["results"]["choices"]["acc,none"] < 1, "a figure that tells something"
    samples = list(zip(ours["samples"]["choices"], theirs["samples"]["choices"], strict=True))
    assert len(samples) == 24
    for our, their in samples:
        (found, greedy), (wanted, wanted_greedy) = (zip(*each["filtered_resps"], strict=True) for each in (our, their))
        assert found == pytest.approx(wanted, abs=TOLERANCE, rel=0) and greedy == wanted_greedy
        assert ranked(found) == ranked(wanted)


def ranked(likelihoods: tuple[float, ...]) -> list[int]:
    return sorted(range(len(likelihoods)), key=likelihoods.__getitem__)
