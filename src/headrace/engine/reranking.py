"""What a reranker reads, a query and a document as one text, and what becomes of its judgement: one number.

A classifier with one label judges by its logit. A language model judges by its next token, yes or no, as
Qwen3-Reranker is published (https://huggingface.co/Qwen/Qwen3-Reranker-0.6B). No torch: the server reranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from headrace.engine.scoring import MOST_CHARACTERS, Encoder
from headrace.types import InvalidRequest, SamplingParams

PLAIN = "{query}\n{document}"
"""Of a classifier that brings no template."""

QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""Of a language model, with the instruction that is published for the web."""
QWEN3_TOKEN = "<|im_start|>"
"""A tokenizer that has this token can write QWEN3."""

ANSWERS = ("yes", "no")
PLACE = re.compile(r"\{(query|document)\}")


def joined(template: str, query: str, documents: Sequence[str]) -> list[str]:
    """Each document with the query, as one text. Raises InvalidRequest naming `template` unless {query} and {document}
    stand in it once each, `query` where it is too long to be read with each document."""
    head, first, middle, second, tail = _split(template)
    repeated = (len(template) + len(query)) * len(documents)
    if repeated > MOST_CHARACTERS:
        told = f"{len(documents):,} documents with a query and a template of {len(template) + len(query):,} characters"
        raise InvalidRequest(f"{told} are too much to tokenize together: shorten it, or give fewer documents", "query")
    if (first, second) == ("query", "document"):
        return [f"{head}{query}{middle}{document}{tail}" for document in documents]
    return [f"{head}{document}{middle}{query}{tail}" for document in documents]


def _split(template: str) -> list[str]:
    """Text, place, text, place, text."""
    parts = PLACE.split(template)
    if sorted(parts[1::2]) != ["document", "query"]:
        raise InvalidRequest("template must have {query} and {document} in it, once each", "template")
    return parts


def answers_of(tokenizer: Encoder) -> tuple[int, int]:
    """The tokens yes and no. Raises InvalidRequest naming `model` where they are several tokens each."""
    found = [tokenizer.encode(word, add_special_tokens=False) for word in ANSWERS]
    if any(len(tokens) != 1 for tokens in found):
        told = "this model has no classifier's head, and yes and no are no tokens of its own: ask /v1/score"
        raise InvalidRequest(told, "model")
    return found[0][0], found[1][0]


def asks_for(answers: tuple[int, int]) -> SamplingParams:
    """Parameters of a request that reports how likely these two are as the next token, in this order."""
    return SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, logprob_token_ids=answers)


def sigmoid(logit: float) -> float:
    """1 / (1 + exp(-logit)), for any finite logit."""
    small = math.exp(-abs(logit))
    return (1.0 if logit >= 0 else small) / (1.0 + small)
