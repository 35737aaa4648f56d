"""Harmony: (what the model writes, text, calls, reasoning). The tools are get_weather and search."""

THINK = "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"
TO = "<|channel|>commentary to=functions."

CASES = [
    ("Words without a header.", "Words without a header.", [], ""),
    ("<|channel|>final<|message|>Hello.<|return|>", "Hello.", [], ""),
    ("<|channel|>final<|message|> Hello \n", " Hello \n", [], ""),
    (f"{THINK}Hm, é.{NEXT}<|channel|>final<|message|>Yes.<|return|>", "Yes.", [], "Hm, é."),
    (
        f'{THINK}Need it.{NEXT}{TO}search <|constrain|>json<|message|>{{"q": "x"}}<|call|>',
        "",
        [("search", '{"q": "x"}')],
        "Need it.",
    ),
    (f'{TO}search<|message|>{{"q": "x"}}<|call|>', "", [("search", '{"q": "x"}')], ""),
    (f'{TO}search json<|message|>{{"q": "x"}}', "", [("search", '{"q": "x"}')], ""),
    (
        f'{TO}search <|constrain|>json<|message|>{{"q": "}} {{ \\" 👍"}}<|call|>',
        "",
        [("search", '{"q": "} { \\" 👍"}')],
        "",
    ),
    (
        f"<|channel|>commentary<|message|>I look it up.{NEXT}{TO}search <|constrain|>json<|message|>{{}}<|call|>",
        "I look it up.",
        [("search", "{}")],
        "",
    ),
    (
        f"{TO}search <|constrain|>json<|message|>{{}}<|call|><|start|>assistant"
        f'{TO}get_weather <|constrain|>json<|message|>{{"city": "Oslo"}}<|call|>',
        "",
        [("search", "{}"), ("get_weather", '{"city": "Oslo"}')],
        "",
    ),
    (
        '<|start|>assistant to=functions.search<|channel|>commentary json<|message|>{"q": 1}<|call|>',
        "",
        [("search", '{"q": 1}')],
        "",
    ),
    (
        ' to=functions.search<|channel|>commentary json<|message|>{"q": 1}<|call|>',
        "",
        [("search", '{"q": 1}')],
        "",
    ),
    (" to=python<|channel|>analysis code<|message|>1 + 1<|call|>", "", [], "1 + 1"),
    (" to=functions.search in words", " to=functions.search in words", [], ""),
    ("to=", "to=", [], ""),
    (
        "<|start|>assistant<|channel|>final<|message|>Hi",
        "Hi",
        [],
        "",
    ),
    ('<|channel|>commentary to=search <|constrain|>json<|message|>{"q": 1}<|call|>', "", [("search", '{"q": 1}')], ""),
    (f"{TO}not.known <|constrain|>json<|message|>{{}}<|call|>", "", [("not.known", "{}")], ""),
    (f"{TO}search <|constrain|>json<|message|><|call|>", "", [("search", "{}")], ""),
    (f'{TO}search <|constrain|>json<|message|>\n {{"a": 1}} \n<|call|>', "", [("search", '{"a": 1}')], ""),
    (
        f"<|channel|>analysis to=python code<|message|>print(1){NEXT}<|channel|>final<|message|>1",
        "1",
        [],
        "print(1)",
    ),
    ("<|channel|>commentary to=browser.open json<|message|>{}<|call|>", "", [], "{}"),
    (f"{THINK}One.{NEXT}{THINK}Two.{NEXT}<|channel|>final<|message|>Three.", "Three.", [], "One.\nTwo."),
    (f"<|channel|>commentary<|message|>A{NEXT}<|channel|>final<|message|>B", "A\nB", [], ""),
    (f"{THINK}no end<|channel|>final<|message|>text", "text", [], "no end"),
    (f"{THINK}cut in the mid", "", [], "cut in the mid"),
    (f"{THINK} \n spaces \n {NEXT}", "", [], "spaces"),
    ("<|channel|>ana", "", [], ""),
    ("<|channel|>analysis<|mess", "", [], ""),
    (f"{TO}sea", "", [], ""),
    (f"{TO}search ", "", [("search", "")], ""),
    (f"{TO}search <|constrain|>json", "", [("search", "")], ""),
    (f'{TO}search <|constrain|>json<|message|>{{"q": "ha', "", [("search", '{"q": "ha')], ""),
    (f"Before {TO}search <|message|>{{}}<|call|> after", "Before after", [("search", "{}")], ""),
    ("<|channel|>other<|message|>some words<|end|>", "some words", [], ""),
    ("1 <| 2 and <|chan", "1 <| 2 and <|chan", [], ""),
    ("<|end|><|end|>x<|return|>", "x", [], ""),
    (f"{THINK}<|end|>", "", [], ""),
]
