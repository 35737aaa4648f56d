"""DeepSeek-V3, R1 and V3.1: (what the model writes, text, calls)."""

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def fenced(name: str, arguments: str = "{}") -> str:
    """As V3 writes it."""
    return f"{CALL}function{SEP}{name}\n```json\n{arguments}\n```{CALL_END}"


def plain(name: str, arguments: str = "{}") -> str:
    """As V3.1 writes it."""
    return f"{CALL}{name}{SEP}{arguments}{CALL_END}"


def whole(*calls: str) -> str:
    return "".join([BEGIN, *calls, END])


QUOTED = '{"q": "Zürich ``` {"}'
NESTED = '{"a": {"b": [1]}}'
CASES = [
    ("No call.", "No call.", []),
    ("A < b, ```json\n{}\n``` and <｜tool", "A < b, ```json\n{}\n``` and <｜tool", []),
    (whole(fenced("now")), "", [("now", "{}")]),
    (whole(plain("now")), "", [("now", "{}")]),
    (whole(fenced("search", QUOTED)), "", [("search", QUOTED)]),
    (whole(plain("search", QUOTED)), "", [("search", QUOTED)]),
    (whole(fenced("search", NESTED)), "", [("search", NESTED)]),
    (whole(fenced("now"), "\n", fenced("f", NESTED)), "", [("now", "{}"), ("f", NESTED)]),
    (whole(plain("now"), plain("f", NESTED)), "", [("now", "{}"), ("f", NESTED)]),
    (whole(plain("now"), fenced("f")), "", [("now", "{}"), ("f", "{}")]),
    (f"I look.\n\n{whole(plain('now'))}\nDone.", "I look.\n\nDone.", [("now", "{}")]),
    (f"I look.{whole(fenced('now'))}", "I look.", [("now", "{}")]),
    (plain("now"), "", [("now", "{}")]),
    (whole("\n", plain("now"), "\n"), "", [("now", "{}")]),
    (whole(f"{CALL}now{SEP}{CALL_END}"), "", [("now", "{}")]),
    (whole(f"{CALL}function{SEP}now{CALL_END}"), "", [("now", "{}")]),
    (whole(plain("function")), "", [("function", "{}")]),
    (whole(f"{CALL}function{SEP}now\n{{}}{CALL_END}"), "", [("now", "{}")]),
    (whole(plain("now", "```json\n{}\n```")), "", [("now", "{}")]),
    (f"{BEGIN}{CALL}now{SEP}none{CALL_END}", f"none{CALL_END}", [("now", "{}")]),
    (f"{BEGIN}{plain('now')} then {END}", f"then {END}", [("now", "{}")]),
    (f"{BEGIN}{END}", f"{BEGIN}{END}", []),
    (f"{BEGIN}words", f"{BEGIN}words", []),
    (f"{BEGIN}{CALL}{SEP}now", f"{BEGIN}{CALL}{SEP}now", []),
    (f"{BEGIN}{CALL}now {SEP}", f"{BEGIN}{CALL}now {SEP}", []),
    (f"{BEGIN}{CALL}{plain('now')}", f"{BEGIN}{CALL}", [("now", "{}")]),
    (f"{SEP}{CALL_END}", f"{SEP}{CALL_END}", []),
    (f"{BEGIN}{CALL}sea", f"{BEGIN}{CALL}sea", []),
    (f"{BEGIN}{CALL}function{SEP}", f"{BEGIN}{CALL}function{SEP}", []),
    (f"{BEGIN}{CALL}function{SEP}sea", f"{BEGIN}{CALL}function{SEP}sea", []),
    (f"{BEGIN}{CALL}function{SEP}search\n", "", [("search", "")]),
    (f"{BEGIN}{CALL}function{SEP}search\n``", "", [("search", "")]),
    (f"{BEGIN}{CALL}function{SEP}search\n```js", "", [("search", "")]),
    (f"{BEGIN}{CALL}search{SEP}", "", [("search", "")]),
    (f"{BEGIN}{CALL}search{SEP}{QUOTED[:8]}", "", [("search", QUOTED[:8])]),
    (f"{BEGIN}{CALL}function{SEP}search\n```json\n{NESTED[:12]}", "", [("search", NESTED[:12])]),
    (f"{BEGIN}{CALL}function{SEP}search\n```json\n{{}}\n``", "", [("search", "{}")]),
    (f"{BEGIN}{CALL}search{SEP}{{}}{CALL_END}<｜tool▁ca", "", [("search", "{}")]),
    (whole(plain("名前")), "", [("名前", "{}")]),
]
