"""MiniMax-M2: (what the model writes, text, calls).

The tools are search (q: string, n: integer, tags: array, flag: boolean, any: string or null, x: no type) and now.
"""

BEGIN, END = "<minimax:tool_call>", "</minimax:tool_call>"


def invoke(name: str, *parameters: tuple[str, str]) -> str:
    """As the model's template writes it."""
    told = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in parameters)
    return f'<invoke name="{name}">\n{told}</invoke>\n'


def whole(*invokes: str) -> str:
    return f"{BEGIN}\n{''.join(invokes)}{END}"


CASES = [
    ("No call, but a < b.", "No call, but a < b.", []),
    (whole(invoke("now")), "", [("now", "{}")]),
    (whole(invoke("now"), invoke("now")), "", [("now", "{}")] * 2),
    (whole(invoke("now")) + "\n" + whole(invoke("now")), "", [("now", "{}")] * 2),
    (whole(invoke("search", ("q", "Zürich"))), "", [("search", '{"q": "Zürich"}')]),
    (whole(invoke("search", ("q", "a"), ("n", "3"))), "", [("search", '{"q": "a", "n": 3}')]),
    (whole(invoke("search", ("q", "3")), invoke("now")), "", [("search", '{"q": "3"}'), ("now", "{}")]),
    (whole(invoke("search", ("q", 'say "hi"\n\tto me 👋'))), "", [("search", r'{"q": "say \"hi\"\n\tto me 👋"}')]),
    (whole(invoke("search", ("q", "\n  indented\n"))), "", [("search", r'{"q": "\n  indented\n"}')]),
    (whole(invoke("search", ("q", ""))), "", [("search", '{"q": ""}')]),
    (whole(invoke("search", ("tags", '["a", {"b": "]"}]'))), "", [("search", '{"tags": ["a", {"b": "]"}]}')]),
    (whole(invoke("search", ("flag", "True"))), "", [("search", '{"flag": true}')]),
    (whole(invoke("search", ("flag", "\nfalse\n"))), "", [("search", '{"flag": false}')]),
    (whole(invoke("search", ("any", "null"), ("q", "null"))), "", [("search", '{"any": null, "q": "null"}')]),
    (whole(invoke("search", ("any", "12"))), "", [("search", '{"any": "12"}')]),
    (whole(invoke("search", ("x", "12"), ("unknown", "w"))), "", [("search", '{"x": 12, "unknown": "w"}')]),
    (whole(invoke("search", ("n", "many"))), "", [("search", '{"n": "many"}')]),
    (
        whole(invoke("search", ("q", "<b></invoke>" + END))),
        "",
        [("search", '{"q": "<b></invoke></minimax:tool_call>"}')],
    ),
    (whole(invoke("other", ("a", "1"), ("b", "{'py': 1}"))), "", [("other", '{"a": 1, "b": "{\'py\': 1}"}')]),
    (whole(invoke("search", ("q", "x"))).replace("\n", ""), "", [("search", '{"q": "x"}')]),
    (f"I look.\n\n{whole(invoke('now'))}\nDone.", "I look.\n\nDone.", [("now", "{}")]),
    (f'{BEGIN}<invoke name="now">\n{END} x', "x", [("now", "{}")]),
    (f"{BEGIN}{invoke('now')}words {END}", f"words {END}", [("now", "{}")]),
    (invoke("now"), invoke("now"), []),
    (f"{BEGIN}{END}", f"{BEGIN}{END}", []),
    (f"{BEGIN}\nwords", f"{BEGIN}\nwords", []),
    (f'{BEGIN}<invoke name="">', f'{BEGIN}<invoke name="">', []),
    (f"{BEGIN}{BEGIN}{invoke('now')}{END}", BEGIN, [("now", "{}")]),
    (f'{BEGIN}<invoke name="sea', f'{BEGIN}<invoke name="sea', []),
    (f'{BEGIN}<invoke name="search">', "", [("search", "")]),
    (f'{BEGIN}<invoke name="search">\n<para', "", [("search", "")]),
    (f'{BEGIN}<invoke name="search">\n<parameter name="q"', "", [("search", "")]),
    (f'{BEGIN}<invoke name="search"><parameter name="q">half a li', "", [("search", '{"q": "half a li')]),
    (f'{BEGIN}<invoke name="search"><parameter name="n">12', "", [("search", '{"n": ')]),
    (f'{BEGIN}{invoke("now")}<invoke name="sea', '<invoke name="sea', [("now", "{}")]),
    (f"{BEGIN}{invoke('now')}<inv", "", [("now", "{}")]),
    (f"{BEGIN}{invoke('now')}</minimax:", "", [("now", "{}")]),
    (
        f'{BEGIN}<invoke name="search"><parameter name="q">a</parameter>\nwords',
        "words",
        [("search", '{"q": "a"')],
    ),
    ("a <minimax:tool", "a <minimax:tool", []),
]
