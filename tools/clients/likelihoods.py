"""Log likelihoods by transformers, in float32: what those of a server are compared with. Run by Headrace's Python: the
clients' environment has no torch.

    .venv/bin/python tools/clients/likelihoods.py MODEL [no-bos]   # JSON: pairs of text and option in, likelihoods out
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    folder, bos = sys.argv[1], sys.argv[2:] != ["no-bos"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")

    def likelihood(text: str, option: str) -> tuple[float, bool]:
        """As lm-eval's `hf` has it: the option's tokens are those behind the text's, of both tokenized together."""
        tokens, start = (tokenizer.encode(each, add_special_tokens=bos) for each in (text + option, text))
        table = model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)[len(start) - 1 : -1]
        targets = torch.tensor(tokens[len(start) :])
        return float(table[range(len(targets)), targets].sum()), bool((table.argmax(-1) == targets).all())

    with torch.inference_mode():
        json.dump([likelihood(text, option) for text, option in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
