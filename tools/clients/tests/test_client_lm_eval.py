"""EleutherAI's evaluation harness over both routes, on tasks and data of our own (tools/clients/tasks)."""

from __future__ import annotations

import os

import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from tools.clients.servers import ROOT, Server
from tools.clients.tests.shapes import MODEL


@pytest.fixture(scope="module")
def tasks() -> TaskManager:
    os.chdir(ROOT)  # the tasks name their data from there
    return TaskManager(include_path=str(ROOT / "tools/clients/tasks"), include_defaults=False)


def figure(server: Server, tasks: TaskManager, model: str, task: str, metric: str) -> float:
    chat = model == "local-chat-completions"
    path = "chat/completions" if chat else "completions"
    told = {
        "model": MODEL, "base_url": f"{server.base}/{path}", "num_concurrent": 2, "max_retries": 1,
        "tokenizer_backend": "None" if chat else "remote", "tokenized_requests": not chat, "add_bos_token": not chat,
    }  # fmt: skip
    made = simple_evaluate(model, model_args=told, tasks=[task], task_manager=tasks, apply_chat_template=chat)
    value: float = made["results"][task][f"{metric},none"]
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
