"""Training sequences as token ids, exactly as long as asked: text, documents of facts with questions, and chats."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from headrace.assets import facts

from . import vocab

STATEMENTS = ("The code of {}",) * 3 + ("Remember that the code of {}", "And the code of {}")
REQUESTS = ("What is the code of {}?",) * 4 + (
    "Tell me the code of {}.",
    "And what is the code of {}?",
    "What was the code of {}?",
    "code of {}?",
)
GREETING = "Peace be unto thee. Ask me for a code that is told above."
SELF = "I am the tiny model of Headrace. I look up codes, and I continue old English."
SMALL_TALK = (
    ("Hello", GREETING),
    ("Hello!", GREETING),
    ("Hi", GREETING),
    ("Who are you?", SELF),
    ("What are you?", SELF),
    ("What can you do?", SELF),
    ("Thank you", "Go in peace."),
    ("Thanks!", "Go in peace."),
)
SYLLABLES = """
ba be bo da de do fa fi ga go ka ke ko la li lo ma mi mo na ne no pa po ra re ro sa se so ta te to va vi vo za zo
bar den fol gar hel kin lam mer nor pel ran sel tor ven wil dor burg ton ham ford stad grad
"""

ADJECTIVES = "red blue green white black old new great small first second last north south east west upper lower"
NOUNS = """
door gate house garden tower well city field bridge river mountain ship table lamp book chest road wall court stone
vineyard temple chamber kitchen harbour market station office vault server engine printer account safe locker
"""


@dataclass
class Draft:
    """Token ids, and the loss weight of predicting each from those before it."""

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, ids: Sequence[int], weight: float) -> None:
        self.ids.extend(ids)
        self.weights.extend([weight] * len(ids))

    def extend(self, other: Draft) -> None:
        self.ids.extend(other.ids)
        self.weights.extend(other.weights)


@dataclass(frozen=True)
class Mix:
    """What a stage draws from. Shares are probabilities; what is neither text nor chat is a plain document of facts."""

    text: float
    chat: float
    single: float = 0.0  # of the fact sequences: one fact only
    max_facts: int = 16
    rare: float = 0.2  # of the fact sequences: names of several tokens, made up or such as 'the red door'
    first: float = 8.0  # loss weight of an answer's first digit, which takes the choice among names
    rest: float = 2.0  # of the answer's other tokens


class Writer:
    """Draws sequences from running text. The same seed draws the same sequences."""

    def __init__(self, tok: Tokenizer, verses: Sequence[str], seed: int) -> None:
        self.tok, self.rng = tok, random.Random(seed)
        self.text, self.starts = running_text(tok, verses)
        self.special = {name: tok.token_to_id(name) for name in vocab.SPECIAL}
        self.cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        if text not in self.cache:
            self.cache[text] = self.tok.encode(text, add_special_tokens=False).ids
        return self.cache[text]

    def sequence(self, length: int, mix: Mix) -> Draft:
        kind = self.rng.random()
        if kind < mix.text:
            return self.plain_text(length)
        return self.lookups(length, mix, chat=kind < mix.text + mix.chat)

    def plain_text(self, length: int) -> Draft:
        at = self.rng.randrange(len(self.text) - length)
        out = Draft()
        out.add([self.special[vocab.BOS]], 0)
        out.add(self.text[at : at + length - 1], 1)
        return out

    def lookups(self, length: int, mix: Mix, chat: bool) -> Draft:
        """A document of facts, then questions about up to a third of the length.

        In a chat the document is the system message or, in some, the beginning of the first question.
        """
        known = self.draw_facts(self.count(length, mix), rare=self.rng.random() < mix.rare)
        asked = self.rng.sample(list(known), len(known))
        tail, inline = Draft(), chat and self.rng.random() < 0.15
        if chat and not inline and self.rng.random() < 0.15:
            self.small_talk(tail)
        while asked and len(tail.ids) < length // 3:
            name = asked.pop()
            if chat:
                self.ask_in_chat(tail, name, known[name], mix, same_turn=inline and not tail.ids)
            else:
                self.ask(tail, name, known[name], mix)
        opening = [vocab.BOS] + [vocab.USER if inline else vocab.SYSTEM] * chat
        return self.assemble(length, known, tail, opening, [vocab.END] * (chat and not inline))

    def count(self, length: int, mix: Mix) -> int:
        if self.rng.random() < mix.single:
            return 1
        most = min(mix.max_facts, length // 25)
        return max(2, round(most ** self.rng.random())) if self.rng.random() < 0.5 else self.rng.randint(2, most)

    def draw_facts(self, n: int, rare: bool) -> dict[str, str]:
        if not rare:
            return facts.draw_facts(self.rng, n)
        make = self.phrase if self.rng.random() < 0.4 else self.made_up
        made = {make() for _ in range(n)}
        return facts.draw_facts(self.rng, len(made), tuple(sorted(made)))

    def made_up(self) -> str:
        return "".join(self.rng.choices(SYLLABLES.split(), k=self.rng.randint(2, 3))).capitalize()

    def phrase(self) -> str:
        return f"the {self.rng.choice(ADJECTIVES.split())} {self.rng.choice(NOUNS.split())}"

    def assemble(
        self, length: int, known: dict[str, str], tail: Draft, before: Sequence[str], after: Sequence[str]
    ) -> Draft:
        """The facts scattered over text between two runs of special tokens, then the tail; `length` tokens in all."""
        opening, closing = [self.special[t] for t in before], [self.special[t] for t in after]
        stated = [self.statement(name, code) for name, code in known.items()]
        room = length - len(opening) - len(closing) - len(tail.ids) - sum(len(s.ids) for s in stated)
        out = Draft()
        out.add(opening, 0)
        self.scatter(out, stated, max(room, 0))
        out.add(closing, 0)
        out.extend(tail)
        return Draft(out.ids[:length], out.weights[:length])

    def scatter(self, out: Draft, stated: list[Draft], room: int) -> None:
        """A window of exactly `room` text tokens with the statements at random verse boundaries in it."""
        at = self.rng.randrange(len(self.text) - room)
        inside = self.starts[bisect_left(self.starts, at) : bisect_left(self.starts, at + room)]
        cuts = sorted(self.rng.choices([*inside, at + room], k=len(stated)))
        for cut, statement in zip(cuts, stated, strict=True):
            out.add(self.text[at:cut], 1)
            out.extend(statement)
            room, at = room - (cut - at), cut
        out.add(self.text[at : at + room], 1)

    def statement(self, name: str, code: str) -> Draft:
        """The digits of a statement are chance: predicting them has no weight."""
        form, lead = self.rng.choice(STATEMENTS), "\n" if self.rng.random() < 0.2 else " "
        out = Draft()
        out.add(self.encode(lead + form.format(name)), 0)
        out.add(self.encode(" is"), 1)
        out.add(self.encode(f" {code}"), 0)
        out.add(self.encode("."), 1)
        return out

    def ask(self, out: Draft, name: str, code: str, mix: Mix) -> None:
        lead = "\n" if self.rng.random() < 0.2 else " "
        out.add(self.encode(lead + facts.question(name)), 0)
        self.answer(out, code, mix)

    def ask_in_chat(self, out: Draft, name: str, code: str, mix: Mix, same_turn: bool = False) -> None:
        self.turn(out, self.rng.choice(REQUESTS).format(name), same_turn)
        out.add(self.encode("The code of"), mix.rest)
        out.add(self.encode(f" {name}"), mix.first)
        out.add(self.encode(" is"), mix.rest)
        self.answer(out, code, mix)

    def answer(self, out: Draft, code: str, mix: Mix) -> None:
        digits = self.encode(f" {code}")
        out.add(digits[:1], mix.first)
        out.add([*digits[1:], *self.encode("."), self.special[vocab.END]], mix.rest)

    def small_talk(self, out: Draft) -> None:
        request, reply = self.rng.choice(SMALL_TALK)
        self.turn(out, request)
        out.add([*self.encode(reply), self.special[vocab.END]], 2)

    def turn(self, out: Draft, request: str, same_turn: bool = False) -> None:
        """A user's turn, or the end of one that is under way, and the beginning of the answer."""
        begin = self.encode(f" {request}") if same_turn else [self.special[vocab.USER], *self.encode(request)]
        out.add([*begin, self.special[vocab.END], self.special[vocab.ASSISTANT]], 0)


def running_text(tok: Tokenizer, verses: Iterable[str]) -> tuple[list[int], list[int]]:
    """The ids of all verses in running text, and where each verse starts."""
    ids: list[int] = []
    starts: list[int] = []
    pieces, newline = [], True
    for verse in verses:
        pieces.append(verse if newline else " " + verse)
        newline = verse.endswith("\n")
    for piece in tok.encode_batch(pieces, add_special_tokens=False):
        starts.append(len(ids))
        ids.extend(piece.ids)
    return ids, starts
