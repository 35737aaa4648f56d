"""Qwen3-Coder: (what the model writes, text, calls).

The tools are search (q: string, n: integer, tags: array, flag: boolean, any: string or null, x: no type) and now.
"""


def call(name: str, *parameters: tuple[str, str]) -> str:
    """As the model's template writes it."""
    told = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{told}</function>\n</tool_call>"


CASES = [
    ("No call, but a < b.", "No call, but a < b.", []),
    (call("now"), "", [("now", "{}")]),
    (call("search", ("q", "Zürich")), "", [("search", '{"q": "Zürich"}')]),
    (call("search", ("q", "a"), ("n", "3")), "", [("search", '{"q": "a", "n": 3}')]),
    (call("search", ("q", "3")), "", [("search", '{"q": "3"}')]),
    (call("search", ("q", 'say "hi"\n\tto \\ me 👋')), "", [("search", r'{"q": "say \"hi\"\n\tto \\ me 👋"}')]),
    (call("search", ("q", "\n\ntwo lines around\n\n")), "", [("search", r'{"q": "\n\ntwo lines around\n\n"}')]),
    (call("search", ("q", "")), "", [("search", '{"q": ""}')]),
    (call("search", ("tags", '["a", {"b": "]"}]')), "", [("search", '{"tags": ["a", {"b": "]"}]}')]),
    (call("search", ("flag", "True")), "", [("search", '{"flag": true}')]),
    (call("search", ("flag", "false")), "", [("search", '{"flag": false}')]),
    (call("search", ("any", "null")), "", [("search", '{"any": null}')]),
    (call("search", ("any", "None"), ("q", "None")), "", [("search", '{"any": null, "q": "None"}')]),
    (call("search", ("any", "12")), "", [("search", '{"any": "12"}')]),
    (call("search", ("x", "12"), ("unknown", "words")), "", [("search", '{"x": 12, "unknown": "words"}')]),
    (call("search", ("n", "many")), "", [("search", '{"n": "many"}')]),
    (call("search", ("n", "NaN")), "", [("search", '{"n": "NaN"}')]),
    (
        call("search", ("q", "<function=f> and <parameter=x> and </function>")),
        "",
        [("search", '{"q": "<function=f> and <parameter=x> and </function>"}')],
    ),
    (call("other", ("a", "1"), ("b", "{'py': 1}")), "", [("other", '{"a": 1, "b": "{\'py\': 1}"}')]),
    (call("now") + "\n" + call("now"), "", [("now", "{}")] * 2),
    ("I look.\n\n" + call("now") + "\nDone.", "I look.\n\nDone.", [("now", "{}")]),
    ("<function=now>\n</function>", "", [("now", "{}")]),
    ("<tool_call><function=search><parameter=q>x</parameter></function></tool_call>", "", [("search", '{"q": "x"}')]),
    ("<tool_call>\n<function=now>\n</tool_call> x", "x", [("now", "{}")]),
    ("<tool_call>\nwords", "<tool_call>\nwords", []),
    ("<tool_call>\n<function=>\n</function>", "<tool_call>\n<function=>\n</function>", []),
    ("<tool_call>\n<function=sea", "<tool_call>\n<function=sea", []),
    ("<tool_call>\n<function=search>", "", [("search", "")]),
    ("<tool_call>\n<function=search>\n<parameter=q>\nhalf a li", "", [("search", '{"q": "half a li')]),
    ("<tool_call>\n<function=search>\n<parameter=n>\n12", "", [("search", '{"n": ')]),
    ("<tool_call>\n<function=search>\n<parameter=q>\na\n</parameter>\nwords", "words", [("search", '{"q": "a"')]),
    ("<tool_call>\n<function=search>\n<parameter=q>\na\n</parameter>\n<para", "", [("search", '{"q": "a"')]),
    ("a <function", "a <function", []),
]
