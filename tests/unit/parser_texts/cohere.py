"""Command R7B and A: (what the model writes, text, calls), marks written shorter."""

MARKS = {"<A>": "<|START_ACTION|>", "</A>": "<|END_ACTION|>", "<ACT": "<|START_ACT"}

TEXTS = [
    ("Hello, how can I help?", "Hello, how can I help?", []),
    (" spaces stay \n", " spaces stay \n", []),
    ('<A>[{"tool_name": "get_weather", "parameters": {"city": "Paris"}}]</A>', "",
     [("get_weather", '{"city": "Paris"}')]),
    ("""<A>[
    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Oslo"}},
    {"tool_call_id": "1", "tool_name": "get_weather", "parameters": {"city": "Rome"}}
]</A>""", "", [("get_weather", '{"city": "Oslo"}'), ("get_weather", '{"city": "Rome"}')]),
    ('I will search.<A>[{"tool_name": "f", "parameters": {}, "tool_call_id": "7"}]</A>', "I will search.",
     [("f", "{}")]),
    ('<A>[{"tool_name":"f","parameters":{"city":"Zürich","days":3}}]</A>', "",
     [("f", '{"city":"Zürich","days":3}')]),
    ('<A>[{"tool_name": "a", "parameters": {}}, {"tool_name": "b", "parameters": {"x": [1, 2]}}]</A>', "",
     [("a", "{}"), ("b", '{"x": [1, 2]}')]),
    ('Let me look.\n\n<A>[{"tool_name": "search", "parameters": {"q": "café 你好 👩‍👩‍👧"}}]</A>\n',
     "Let me look.",
     [("search", '{"q": "café 你好 👩‍👩‍👧"}')]),
    ('<A>[{"tool_name": "a", "parameters": {}}]</A>\n<A>[{"tool_name": "b", "parameters": {}}]</A>', "",
     [("a", "{}"), ("b", "{}")]),
    ('First\n<A>[{"tool_name": "a", "parameters": {}}]</A>\nlast.', "First\nlast.", [("a", "{}")]),
    (r'<A>[{"tool_name": "say", "parameters": {"text": "\"hi\" \\ {not} [a] list"}}]</A>', "",
     [("say", r'{"text": "\"hi\" \\ {not} [a] list"}')]),
    ('<A>[{"tool_name": "say", "parameters": {"text": "]</A> and <A>"}}]</A>ok', "ok",
     [("say", '{"text": "]</A> and <A>"}')]),
    ('<A>[{"parameters": {"a": {"b": [{"c": null}, true]}}, "tool_name": "late"}]</A>', "",
     [("late", '{"a": {"b": [{"c": null}, true]}}')]),
    ('<A>[{"tool_name": "f", "parameters": {"x": 1.5e3}}]</A>', "", [("f", '{"x": 1.5e3}')]),
    ('<A>[{"tool_name": "f"}]</A>', "", [("f", "{}")]),
    ('<A>[{"tool_name": "f", "parameters": null}]</A>', "", [("f", "{}")]),
    (r'<A>[{"tool_name": "f", "parameters": "{\"a\": \"é\"}"}]</A>', "", [("f", '{"a": "é"}')]),
    ('<A>{"tool_name": "f", "parameters": {"a": 1}}</A>', "", [("f", '{"a": 1}')]),
    ('<A>[{"type": "function", "tool_name": "f", "parameters": {}}]</A>', "", [("f", "{}")]),
    ('<A>\n [ {  "tool_name" :\t"f" ,\n "parameters" : { } } ] \n</A>  \n', "", [("f", "{ }")]),
    ("<A>not JSON at all</A>", "<A>not JSON at all</A>", []),
    ("<A>[]</A>", "<A>[]</A>", []),
    ("<A>[1, 2]</A>", "<A>[1, 2]</A>", []),
    ('<A>[{"tool_name": 3, "parameters": {}}]</A>', '<A>[{"tool_name": 3, "parameters": {}}]</A>', []),
    ("a <ACT", "a <ACT", []),
    ("a <A>", "a <A>", []),
    ("a <|start_action|>[]<|end_action|>", "a <|start_action|>[]<|end_action|>", []),
    ('<A>[{"tool_name": "get_wea', '<A>[{"tool_name": "get_wea', []),
    ('<A>[{"tool_name": "f"', "", [("f", "")]),
    ('<A>[{"tool_name": "f", "parameters": {"a": "unfinis', "", [("f", '{"a": "unfinis')]),
    ('x<A>[{"tool_name": "f", "parameters": {"a": 1}', "x", [("f", '{"a": 1}')]),
    ('<A><A>[{"tool_name": "f", "parameters": {}}]</A>', "<A>", [("f", "{}")]),
    ('<A>[{"tool_name": "f", "parameters": {"a": oops}}]</A>.', ".", [("f", '{"a": oops}')]),
    ('<A>[{"tool_name": "f", "parameters": {}}]<|END_ACT', "", [("f", "{}")]),
    ("<|START_ACTIONS|> and </A> are no call", "<|START_ACTIONS|> and </A> are no call", []),
]  # fmt: skip


def _spelled(text: str) -> str:
    for short, mark in MARKS.items():
        text = text.replace(short, mark)
    return text


CASES = [
    (_spelled(written), _spelled(text), [(name, _spelled(arguments)) for name, arguments in calls])
    for written, text, calls in TEXTS
]
