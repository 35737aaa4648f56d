"""HunYuan-A13B: (what the model writes, text, calls), those of Nemotron between other marks."""

from tests.unit.parser_texts import nemotron_json

MARKS = {
    "<TOOLCALL>": "<tool_calls>",
    "</TOOLCALL>": "</tool_calls>",
    "<TOOLCAL": "<tool_call",
    "</TOOLC": "</tool_c",
}


def _spelled(text: str) -> str:
    for theirs, mark in MARKS.items():
        text = text.replace(theirs, mark)
    return text


CASES = [
    (_spelled(written), _spelled(text), [(name, _spelled(arguments)) for name, arguments in calls])
    for written, text, calls in nemotron_json.CASES
]
