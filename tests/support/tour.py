"""The screens of docs/tour.md: the commands that make them, and what of them is the same everywhere.

A screen stands in the page as a block of text after a comment that names it: <!-- screen: serve -->.
tools/tour/write.py makes the screens again and writes them there.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.assets.facts import fact_document, question
from tests.support.terminal import KEEP, Step, seen

PAGE = Path(__file__).parents[2] / "docs" / "tour.md"
WIDTH = 80
SCREEN = re.compile(r"(?<=<!-- screen: )([a-z-]+)( -->\n+```text\n)(.*?)(?=\n```)", re.DOTALL)

NOTES, CODES = fact_document(random.Random(1), 8, 600)
LONG, LONG_CODES = fact_document(random.Random(3), 8, 12_000)
ASKED, ASKED_NEXT = list(CODES)[:2]


@dataclass(frozen=True)
class Scene:
    """One screen: arguments of headrace, what is typed or done meanwhile, and the exit code.

    passing: a pattern of lines that come or not, by the time that things take. first_words: after the first empty
    line only the first word of each is the same on every machine; of other screens it is all but numbers.
    """

    name: str
    arguments: tuple[str, ...]
    steps: tuple[Step, ...] = ()
    code: int = 0
    passing: str = r"INFO +(load|running)"
    width: int = WIDTH
    first_words: bool = False

    def made(self, folder: Path) -> str:
        """The screen on a terminal, as a person types the command in `folder`. Raises AssertionError for another
        exit code."""
        (folder / "notes.txt").write_text(NOTES + "\n")
        (folder / "long.txt").write_text(f"{LONG} {question(next(iter(LONG_CODES)))}\n")
        port = _free_port()
        program = (sys.executable, "-c", "from headrace.cli.main import app; app(prog_name='headrace')")
        steps = [(pattern, _doing(then, port)) for pattern, then in self.steps]
        arguments = [part.replace("{port}", str(port)) for part in self.arguments]
        before = Path.cwd()
        os.chdir(folder)
        try:
            text, code = seen([*program, *arguments], self.width, _environment(folder), steps, 120)
        finally:
            os.chdir(before)
        assert code == self.code, text
        return text.replace(f":{port}", ":8000").replace("\t", " ")

    def same(self, text: str) -> list[str]:
        """What another machine shows too: words, but for numbers, whether times keep their limits, instruction sets,
        and lengths of blanks and rules."""
        lines = [line for line in text.splitlines() if line.strip() and not re.search(self.passing, line)]
        if self.first_words:
            later = text.partition("\n\n")[2].splitlines()
            return [words[0] for line in later if (words := line.split()) and not line.startswith("  ")]
        verdicts = [re.sub(r"\b(ok|short)\s*$", "verdict", line) for line in lines]  # of times, on a busy machine too
        text = re.sub(r"\b(portable|amx|avx\w*|neon\w*)\b", "isa", " ".join(verdicts))
        whole = re.sub(r"\b[0-9a-f]{8}\b|[\d,.]*\d\s*([KMG]iB|B|ms|us|s|k)?\b|[─━╺╸]+|\s+", " ", text)
        return whole.split()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(home: Path) -> dict[str, str]:
    """home: where the server keeps KV, below .cache."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "XDG_"))}
    return {**kept, "HEADRACE_THREADS": "1", "HEADRACE_KV_CACHE_TOKENS": "65536", "HOME": str(home)}


def _doing(then: str | Callable[[], None], port: int) -> str | Callable[[], None]:
    return (lambda: ask(port)) if then == "ask" else then


def ask(port: int) -> None:
    """Two questions over one text, one that is refused, and time for the server to say so."""
    for name, model in ((ASKED, "tiny"), (ASKED_NEXT, "tiny"), (ASKED, "huge")):
        messages = [{"role": "system", "content": NOTES}, {"role": "user", "content": question(name)}]
        body = json.dumps({"model": model, "messages": messages, "max_tokens": 16, "temperature": 0}).encode()
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                reply.read()
        except urllib.error.HTTPError as refused:
            refused.close()
    time.sleep(1.5)


def on_page(text: str) -> dict[str, str]:
    """The screens of the page by name."""
    return {found[1]: found[3] for found in SCREEN.finditer(text)}


def with_screens(text: str, screens: dict[str, str]) -> str:
    """The page with these screens in place of those it has."""
    return SCREEN.sub(lambda found: found[1] + found[2] + screens.get(found[1], found[3]), text)


def chosen(names: Sequence[str]) -> list[Scene]:
    """Those of these names, or all. Raises ValueError for a name that there is not."""
    known = {scene.name: scene for scene in SCENES}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no screen {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in names] or list(SCENES)


ANSWERED = r"tokens/s[^>]*>"

SCENES = (
    Scene("help", ("--help",)),
    Scene("demo", ("demo",)),
    Scene(
        "serve", ("serve", "tiny", "--port", "{port}", "--log-interval-s", "1"),
        (("^.*curl", "ask"), ("", "\x03")), width=120,
    ),
    Scene(
        "generate",
        ("generate", "-m", "tiny", "--max-tokens", "8", "--dtype", "fp32", "--max-batch-tokens", "512",
         "--file", "long.txt"),
        ((r"reading .* left", KEEP),),
    ),
    Scene(
        "chat", ("chat", "tiny", "--system-file", "notes.txt"),
        (("^>", question(ASKED) + "\n"), (ANSWERED, question(ASKED_NEXT) + "\n"),
         (ANSWERED + r"(.*\n)*.*" + ANSWERED, "/stats\n"), (r"/stats(.*\n)+>", "/exit\n")),
    ),
    Scene("doctor", ("doctor", "tiny"), first_words=True),
    Scene("bench", ("bench", "cache", "--model", "tiny")),
    Scene("bench-serve", ("bench", "serve", "--url", "http://127.0.0.1:{port}"), code=1),
)  # fmt: skip
