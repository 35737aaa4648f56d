"""Hermes and Qwen: (what the model writes, text, calls)."""

CASES = [
    ("Hello, how can I help?", "Hello, how can I help?", []),
    ("  spaces stay where no call is \n", "  spaces stay where no call is \n", []),
    (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        "",
        [("get_weather", '{"city": "Paris"}')],
    ),
    (
        '<tool_call>{"name":"get_weather","arguments":{"city":"Zürich","days":3}}</tool_call>',
        "",
        [("get_weather", '{"city":"Zürich","days":3}')],
    ),
    (
        'Let me look.\n\n<tool_call>\n{"name": "search", "arguments": {"q": "café 你好 👩‍👩‍👧"}}\n</tool_call>\n',
        "Let me look.",
        [("search", '{"q": "café 你好 👩‍👩‍👧"}')],
    ),
    (
        '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "b", "arguments": {"x": [1, 2]}}\n</tool_call>',
        "",
        [("a", "{}"), ("b", '{"x": [1, 2]}')],
    ),
    (
        'First\n<tool_call>{"name": "a", "arguments": {}}</tool_call>\nthen\n'
        '<tool_call>{"name": "b", "arguments": {}}</tool_call>\nlast.',
        "First\nthen\nlast.",
        [("a", "{}"), ("b", "{}")],
    ),
    (
        r'<tool_call>{"name": "say", "arguments": {"text": "he said \"hi\" and \\ left {not} [a] list"}}</tool_call>',
        "",
        [("say", r'{"text": "he said \"hi\" and \\ left {not} [a] list"}')],
    ),
    (
        '<tool_call>{"name": "say", "arguments": {"text": "write </tool_call> and <tool_call> here"}}</tool_call>ok',
        "ok",
        [("say", '{"text": "write </tool_call> and <tool_call> here"}')],
    ),
    (
        '<tool_call>{"arguments": {"a": {"b": [{"c": null}, true]}}, "name": "late"}</tool_call>',
        "",
        [("late", '{"a": {"b": [{"c": null}, true]}}')],
    ),
    ('<tool_call>{"name": "f", "parameters": {"x": 1.5e3}}</tool_call>', "", [("f", '{"x": 1.5e3}')]),
    ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    (r'<tool_call>{"name": "f", "arguments": "{\"a\": \"é\"}"}</tool_call>', "", [("f", '{"a": "é"}')]),
    ('<tool_call>{{"name": "f", "arguments": {"a": 1}}}</tool_call>', "", [("f", '{"a": 1}')]),
    (
        '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": "]"}}]</tool_call>',
        "",
        [("f", "{}"), ("g", '{"a": "]"}')],
    ),
    ('<tool_call>{"type": "function", "name": "f", "arguments": {}}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>\n\n  {  "name" :\t"f" ,\n "arguments" : { } }  \n</tool_call>  \n', "", [("f", "{ }")]),
    ("<tool_call>not JSON at all</tool_call>", "<tool_call>not JSON at all</tool_call>", []),
    ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', '<tool_call>{"name": 3, "arguments": {}}</tool_call>', []),
    ('<tool_call>{"arguments": {}}</tool_call> x', '<tool_call>{"arguments": {}}</tool_call> x', []),
    ("a <tool_cal", "a <tool_cal", []),
    ("a <tool_call>", "a <tool_call>", []),
    ('<tool_call>{"name": "get_wea', '<tool_call>{"name": "get_wea', []),
    ('<tool_call>{"name": "f"', "", [("f", "")]),
    ('<tool_call>{"name": "f", "arguments": {"a": "unfinis', "", [("f", '{"a": "unfinis')]),
    ('x<tool_call>{"name": "f", "arguments": {"a": 1}', "x", [("f", '{"a": 1}')]),
    ('<tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>', "<tool_call>", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>.', ".", [("f", '{"a": oops}')]),
    (
        '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "unknown_to_all", "arguments": {}}</tool_call>',
        "",
        [("f", "{}"), ("unknown_to_all", "{}")],
    ),
    (r'<tool_call>{"name": "f\u00e9", "arguments": {"k\\": "\\\\"}}</tool_call>', "", [("fé", r'{"k\\": "\\\\"}')]),
    (r'<tool_call>{"name": "f\ud83d", "arguments": {}}</tool_call>', "", [("f\ufffd", "{}")]),
    (
        r'<tool_call>{"name": "f", "arguments": "{\"x\": \"\ud83d\ude00\ude00\"}"}</tool_call>',
        "",
        [("f", '{"x": "😀\ufffd"}')],
    ),
    ('<tool_call>{"name": "f", "arguments": {}}\n</tool_c', "", [("f", "{}")]),
    (
        "1 < 2 and <tool> is <b>no</b> call, nor is </tool_call>",
        "1 < 2 and <tool> is <b>no</b> call, nor is </tool_call>",
        [],
    ),
]
