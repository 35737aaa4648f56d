"""Seed-OSS: (what the model writes, text, calls). The tools are those of Qwen3-Coder's texts, of which most are here
between this model's marks; nothing stands around values here."""

from tests.unit.parser_texts.qwen3_coder import CASES as KIN


def call(name: str, *parameters: tuple[str, str]) -> str:
    """As the model's template writes it."""
    told = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in parameters)
    return f"<seed:tool_call>\n<function={name}>\n{told}</function>\n</seed:tool_call>"


def own(text: str) -> str:
    text = text.replace("<tool_call", "<seed:tool_call").replace("</tool_call", "</seed:tool_call")
    return text.replace(">\n</parameter>", "></parameter>")


CASES = [
    *((own(text), own(told), calls) for text, told, calls in KIN if "parameter=" not in text),
    (call("search", ("q", "Zürich")), "", [("search", '{"q": "Zürich"}')]),
    (call("search", ("q", "a"), ("n", "3")), "", [("search", '{"q": "a", "n": 3}')]),
    (call("search", ("q", "3")), "", [("search", '{"q": "3"}')]),
    (call("search", ("q", 'say "hi"\n\tto \\ me 👋')), "", [("search", r'{"q": "say \"hi\"\n\tto \\ me 👋"}')]),
    (call("search", ("q", "\na line around\n")), "", [("search", r'{"q": "\na line around\n"}')]),
    (call("search", ("q", "")), "", [("search", '{"q": ""}')]),
    (call("search", ("n", "\n3\n")), "", [("search", '{"n": 3}')]),
    (call("search", ("n", "three")), "", [("search", '{"n": "three"}')]),
    (call("search", ("tags", '["a", "b"]')), "", [("search", '{"tags": ["a", "b"]}')]),
    (call("search", ("flag", "True")), "", [("search", '{"flag": true}')]),
    (call("search", ("any", "null")), "", [("search", '{"any": null}')]),
    (call("search", ("x", "1.5")), "", [("search", '{"x": 1.5}')]),
    (call("search", ("q", "<tool_call>")), "", [("search", '{"q": "<tool_call>"}')]),
    (call("search", ("q", "</seed:tool_call>")), "", [("search", '{"q": "</seed:tool_call>"}')]),
    (call("unknown", ("q", "a")), "", [("unknown", '{"q": "a"}')]),
    ("Let me look.\n" + call("now"), "Let me look.", [("now", "{}")]),
    (call("now") + "\n" + call("search", ("q", "a")), "", [("now", "{}"), ("search", '{"q": "a"}')]),
    (call("search", ("q", "a"))[:-5], "", [("search", '{"q": "a"}')]),
    ("<seed:tool_call>\n<function=search>\n<parameter=q>cut sh", "", [("search", '{"q": "cut sh')]),
    ("<tool_call>\nnot of this model\n</tool_call>", "<tool_call>\nnot of this model\n</tool_call>", []),
]
