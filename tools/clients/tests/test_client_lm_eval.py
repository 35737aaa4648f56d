"""EleutherAI's evaluation harness over both routes, on a task and data of this file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from tools.clients.servers import Server
from tools.clients.tests.shapes import MODEL

ROWS = [{"text": f"The code of {city} is {code}.", "city": city, "code": code}
        for city, code in (("Lisbon", 4821), ("Paris", 9035), ("Oslo", 1177))]  # fmt: skip
HEAD = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{text}}}} What is the code of {{{{city}}}}?"
num_fewshot: 0
"""
KINDS = {
    "generated": """
task: generated
output_type: generate_until
doc_to_target: "{{code}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match, ignore_case: true, regexes_to_ignore: ["[^0-9]"]}]
""",
    "chosen": """
task: chosen
output_type: multiple_choice
doc_to_choice: ["4821", "9035", "1177"]
doc_to_target: "{{code|string}}"
metric_list: [{metric: acc}]
""",
    "rolling": """
task: rolling
output_type: loglikelihood_rolling
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    folder: Path = tmp_path_factory.mktemp("tasks")
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, kind in KINDS.items():
        (folder / f"{name}.yaml").write_text(HEAD.format(data=data) + kind)
    return TaskManager(include_path=str(folder), include_defaults=False)


def figure(server: Server, tasks: TaskManager, model: str, task: str, metric: str) -> float:
    chat = model == "local-chat-completions"
    path = "chat/completions" if chat else "completions"
    told = {
        "model": MODEL, "base_url": f"{server.base}/{path}", "num_concurrent": 2, "max_retries": 1,
        "tokenizer_backend": "None" if chat else "remote", "tokenized_requests": False,
    }  # fmt: skip
    made = simple_evaluate(model, model_args=told, tasks=[task], task_manager=tasks, apply_chat_template=chat)
    value: float = made["results"][task][f"{metric},none"]
    return value


def test_chat(real: Server, tasks: TaskManager) -> None:
    assert figure(real, tasks, "local-chat-completions", "generated", "exact_match") == 1.0


def test_completions(real: Server, tasks: TaskManager) -> None:
    assert figure(real, tasks, "local-completions", "generated", "exact_match") == 1.0


def test_log_likelihoods(real: Server, tasks: TaskManager) -> None:
    """By echo and logprobs of the prompt, with max_tokens of 1 or 0."""
    assert figure(real, tasks, "local-completions", "chosen", "acc") == 1.0


def test_perplexity(real: Server, tasks: TaskManager) -> None:
    assert 1 < figure(real, tasks, "local-completions", "rolling", "word_perplexity") < 1e6
