"""Trains the tiny model that ships with Headrace, measures it, and writes src/headrace/assets/tiny.

    python tools/train_tiny/train.py            train (about 12 minutes on two free cores), export, measure
    python tools/train_tiny/train.py --quick    the same way in a minute or two, into build/train_tiny/quick
    python tools/train_tiny/train.py --measure  measure the model in --out, no training

The text comes from Debian's packages bible-kjv-text and bible-kjv, fetched with apt-get where they are not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))
sys.path.insert(0, str(ROOT / "tools"))

from headrace.assets import facts  # noqa: E402
from train_tiny import evaluate, model, stages, tasks, text, vocab  # noqa: E402
from train_tiny.export import export  # noqa: E402

BUILD = ROOT / "build" / "train_tiny"
FILLER = ROOT / "src" / "headrace" / "assets" / "filler.txt"
MINUTES = 12  # what the stages take as they stand, on two free cores


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the model (default src/headrace/assets/tiny)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="scales the steps of every stage")
    parser.add_argument("--prompts", type=int, default=100, help="prompts for each figure of the accuracy table")
    parser.add_argument("--quick", action="store_true", help="smoke test: few steps, few prompts")
    parser.add_argument("--measure", action="store_true", help="only measure the model in --out")
    args = parser.parse_args()
    if args.quick:
        args.minutes, args.prompts = 0.5, 4
    args.out = args.out or (BUILD / "quick" if args.quick else ROOT / "src" / "headrace" / "assets" / "tiny")
    return args


def scaled(minutes: float) -> tuple[stages.Stage, ...]:
    return tuple(replace(s, steps=max(2, round(s.steps * minutes / MINUTES))) for s in stages.STAGES)


def train(args: argparse.Namespace, corpus: text.Corpus) -> float:
    """Train and export; the minutes it took are returned."""
    began = time.monotonic()
    FILLER.write_text(corpus.filler, encoding="utf-8")
    tok = vocab.train_tokenizer([text.join(corpus.train)], facts.NAMES)
    ends = [tok.token_to_id(name) for name in (vocab.BOS, vocab.END, vocab.PAD)]
    net = model.build(model.tiny_config(tok.get_vocab_size(), *ends), args.seed)
    print(f"{net.num_parameters() / 1e6:.2f} M parameters, {tok.get_vocab_size()} tokens", flush=True)
    writer = tasks.Writer(tok, corpus.train, args.seed)
    probe = tasks.Writer(tok, corpus.held_out, args.seed + 1)

    def after(stage: int) -> None:
        net.eval()
        hits = {n: evaluate.accuracy(net, probe, n, 8, chat=False, n=20) for n in (256, 1024)}
        bits = evaluate.bits_per_byte(net, probe)
        print(f"after stage {stage}: {bits:.3f} bits per byte, accuracy with 8 facts {hits}", flush=True)
        net.train()

    stages.train(net, writer, scaled(args.minutes), after)
    print(f"{export(net, tok, args.out)} bytes written to {os.path.relpath(args.out, ROOT)}", flush=True)
    return (time.monotonic() - began) / 60


def main() -> None:
    args = options()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    corpus = text.load_corpus(BUILD / "text")
    trained = {} if args.measure else {"seed": args.seed, "training_minutes": round(train(args, corpus), 1)}
    figures = evaluate.measure(args.out, corpus.held_out, args.prompts, args.seed + 2) | trained
    path = BUILD / ("quick.json" if args.quick else "measured.json" if args.measure else "metrics.json")
    path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(evaluate.markdown(figures))
    print(f"figures written to {os.path.relpath(path, ROOT)}")


if __name__ == "__main__":
    main()
