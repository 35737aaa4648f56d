"""GLM-4.5 and later: (what the model writes, text, calls).

The tools are search (q: string, n: integer, tags: array, flag: boolean, any: string or null, x: no type) and now.
"""


def call(name: str, *pairs: tuple[str, str]) -> str:
    """As the templates of GLM-4.5 and 4.6 write it."""
    told = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in pairs)
    return f"<tool_call>{name}\n{told}</tool_call>"


def tight(name: str, *pairs: tuple[str, str]) -> str:
    """As GLM-4.7's template writes it."""
    return call(name, *pairs).replace("\n", "")


CASES = [
    ("No call, but a < b.", "No call, but a < b.", []),
    (call("now"), "", [("now", "{}")]),
    (tight("now"), "", [("now", "{}")]),
    (call("search", ("q", "Zürich")), "", [("search", '{"q": "Zürich"}')]),
    (tight("search", ("q", "Zürich")), "", [("search", '{"q": "Zürich"}')]),
    (call("search", ("q", "a"), ("n", "3")), "", [("search", '{"q": "a", "n": 3}')]),
    (tight("search", ("q", "a"), ("n", "3")), "", [("search", '{"q": "a", "n": 3}')]),
    (call("search", ("q", "3")), "", [("search", '{"q": "3"}')]),
    (call("search", ("q", 'say "hi"\n\tto \\ me 👋')), "", [("search", r'{"q": "say \"hi\"\n\tto \\ me 👋"}')]),
    (call("search", ("q", "\n  indented\n\n")), "", [("search", r'{"q": "\n  indented\n\n"}')]),
    (call("search", ("q", "")), "", [("search", '{"q": ""}')]),
    (call("search", ("tags", '["a", {"b": "]"}]')), "", [("search", '{"tags": ["a", {"b": "]"}]}')]),
    (call("search", ("flag", "True")), "", [("search", '{"flag": true}')]),
    (call("search", ("flag", "\nfalse\n")), "", [("search", '{"flag": false}')]),
    (call("search", ("any", "null"), ("q", "null")), "", [("search", '{"any": null, "q": "null"}')]),
    (call("search", ("any", "12")), "", [("search", '{"any": "12"}')]),
    (call("search", ("x", "12"), ("unknown", "words")), "", [("search", '{"x": 12, "unknown": "words"}')]),
    (call("search", ("n", "123_456")), "", [("search", '{"n": "123_456"}')]),
    (
        call("search", ("q", "<tool_call>f<arg_key>x</arg_key> and </tool_call>")),
        "",
        [("search", '{"q": "<tool_call>f<arg_key>x</arg_key> and </tool_call>"}')],
    ),
    (call("other", ("a", "1"), ("b", "{'py': 1}")), "", [("other", '{"a": 1, "b": "{\'py\': 1}"}')]),
    (call("now") + "\n" + call("now"), "", [("now", "{}")] * 2),
    (tight("now") + tight("search", ("n", "1")), "", [("now", "{}"), ("search", '{"n": 1}')]),
    ("I look.\n\n" + call("now") + "\nDone.", "I look.\n\nDone.", [("now", "{}")]),
    (
        "<tool_call> search <arg_key>q</arg_key> <arg_value>x</arg_value> </tool_call>",
        "",
        [("search", '{"q": "x"}')],
    ),
    ("<tool_call>\nwords and more", "<tool_call>\nwords and more", []),
    ("<tool_call>now</tool_call", "", [("now", "")]),
    ('<tool_call>{"name": "now"}</tool_call>', '<tool_call>{"name": "now"}</tool_call>', []),
    ("<tool_call><arg_key>q</arg_key>", "<tool_call><arg_key>q</arg_key>", []),
    ("<tool_call>now<b>", "<tool_call>now<b>", []),
    ("<tool_call><tool_call>now</tool_call>", "<tool_call>", [("now", "{}")]),
    ("<tool_call>sea", "<tool_call>sea", []),
    ("<tool_call>search\n", "", [("search", "")]),
    ("<tool_call>search<", "", [("search", "")]),
    ("<tool_call>search<arg_key>q</arg_ke", "", [("search", "")]),
    ("<tool_call>search<arg_key>q</arg_key>\n<arg_value>half a li", "", [("search", '{"q": "half a li')]),
    ("<tool_call>search<arg_key>n</arg_key>\n<arg_value>12", "", [("search", '{"n": ')]),
    (
        "<tool_call>search<arg_key>q</arg_key><arg_value>a</arg_value>\nwords",
        "words",
        [("search", '{"q": "a"')],
    ),
    ("<tool_call>search<arg_key>q</arg_key><arg_value>a</arg_value>\n<arg_", "", [("search", '{"q": "a"')]),
    ("a <tool_cal", "a <tool_cal", []),
]
