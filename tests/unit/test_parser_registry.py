"""Which parser a model's template gets, what flags change, and what parsers around parsers leave out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.config import EngineConfig
from headrace.config.server import REASONING_ALIASES, REASONING_PARSERS, TOOL_PARSERS
from headrace.server.parsers.parts import Answer, Call, CallStart, PlainText
from headrace.server.parsers.registry import (
    DEEPSEEK_TOKENS,
    NONE,
    REASONING_FORMATS,
    TOOL_FORMATS,
    Formats,
    formats_of,
    make_parser,
)
from headrace.server.turn import Tool, ToolChoice

pytestmark = pytest.mark.unit

SHOWN = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
TEMPLATES = {
    "qwen3": (SHOWN + "<tool_call>\n{\"name\": {% if '</think>' in content %}<think>", "hermes", "think"),
    "qwen2.5": (SHOWN + '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n', "hermes", NONE),
    "qwen3-coder": (SHOWN + "<tool_call>\n<function=example_function_name>\n<parameter=", "qwen3_coder", NONE),
    "seed-oss": (SHOWN + "'<seed:tool_call>' <function=example_function_name>\n<parameter= '</seed:think>'",
                 "seed_oss", "seed_oss"),
    "glm4.6": (SHOWN + "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n{{ '\n<think></think>' }}",
               "glm45", "think"),
    "minimax-m2": (SHOWN + "'<minimax:tool_call>' <invoke name= {{- ']~b]ai' ~ '<think>' }} </think>", "minimax_m2",
                   "think"),
    "deepseek-v3": (SHOWN + "'<｜tool▁call▁begin｜>' + tool.type + '<｜tool▁sep｜>' + name + '\n```json\n'",
                    "deepseek_v3", NONE),
    "deepseek-v3.1": (SHOWN + "'<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments </think>", "deepseek_v31",
                      "think"),
    "llama3.1": (SHOWN + '{"name": function name, "parameters": dictionary of argument name and its value}',
                 "llama3_json", NONE),
    "llama4": (SHOWN + "in the format [func_name1(params_name1=params_value1), func_name2(params)]", "pythonic", NONE),
    "lfm2": ("{% if tools %}" + SHOWN + "'<|tool_call_start|>' + calls + '<|tool_call_end|>'", "lfm2", NONE),
    "nemotron-nano-2": (SHOWN + "'<TOOLCALL>[' + calls + ']</TOOLCALL>' <think></think>", "nemotron_json", "think"),
    "hunyuan-a13b": (SHOWN + "'<tool_calls>[' + calls + ']</tool_calls>' <think></think> '<answer>' in content",
                     "hunyuan_a13b", "hunyuan_a13b"),
    "olmo-3": (SHOWN + "within <function_calls></function_calls> XML tags", "olmo3", NONE),
    "command-a": (SHOWN + "'<|START_THINKING|>' + plan + '<|END_THINKING|><|START_ACTION|>['", "cohere", "cohere"),
    "mistral": ("[AVAILABLE_TOOLS]" + SHOWN + "[TOOL_CALLS] [", "mistral", NONE),
    "magistral": (SHOWN + "'[TOOL_CALLS]' + name + '[ARGS]' [THINK][/THINK]", "mistral", "mistral"),
    "gpt-oss": (SHOWN + "<|start|>assistant<|channel|>analysis<|message|>", "openai", "harmony"),
    "deepseek-r1-distill": ("{% if '</think>' in content %}<｜Assistant｜><think>\n", "json", "think"),
    "no-tools": ("{{ messages[0].content }}", "json", NONE),
    "nothing": ("", "json", NONE),
}  # fmt: skip


@pytest.mark.parametrize(("template", "tools", "reasoning"), TEMPLATES.values(), ids=TEMPLATES)
def test_the_template_chooses(template: str, tools: str, reasoning: str) -> None:
    found = formats_of(template, tool_parser="auto")
    assert (found.tools, found.reasoning) == (tools, reasoning)


def test_the_vocabulary_tells_where_the_template_does_not() -> None:
    tokens = {"[TOOL_CALLS]": 5, "[THINK]": 6, "[/THINK]": 7}
    assert formats_of(SHOWN, tokens=tokens) == Formats("mistral", "mistral", tokens)
    assert formats_of(SHOWN + "<tool_call>", tokens=tokens).tools == "hermes"
    assert formats_of("{{ messages }}", tokens=tokens).tools == "json"
    assert formats_of(SHOWN + "<|tool_list_start|>", tokens={"<|tool_call_start|>": 5}).tools == "lfm2"


def test_a_template_without_tools_must_be_of_a_model_with_the_marks() -> None:
    for name, template in (("deepseek_v3", "<｜tool▁sep｜>\n```json"), ("deepseek_v31", "<｜tool▁sep｜>")):
        assert formats_of(template, tokens=dict.fromkeys(DEEPSEEK_TOKENS, 5)).tools == name
        assert formats_of(template, tokens={"<think>": 5}).tools == "json"
        assert formats_of(template + SHOWN).tools == name


def test_flags_go_before_the_template() -> None:
    found = formats_of(TEMPLATES["qwen3"][0], tool_parser="none", reasoning_parser="deepseek_r1")
    assert (found.tools, found.reasoning) == (NONE, "think")
    with pytest.raises(ValueError, match=r"tool_parser must be one of hermes, .*; did you mean hermes"):
        formats_of("", tool_parser="hermse")
    with pytest.raises(ValueError, match=r"reasoning_parser must be one of .*think, .*, got 'x'"):
        formats_of("", reasoning_parser="x")


VLLM_NAMES = [("llama4_pythonic", "pythonic", "qwen3"), ("glm45", "glm45", "glm45"), ("glm47", "glm45", "glm45"),
              ("minimax_m2", "minimax_m2", "minimax_m2"),
              ("deepseek_v3", "deepseek_v3", "deepseek_r1"),
              ("deepseek_v31", "deepseek_v31", "deepseek_v3")]  # fmt: skip
"""A parser of calls as vLLM calls it, ours, and vLLM's parser of such a model's reasoning."""


def test_settings_know_every_format() -> None:
    assert set(TOOL_PARSERS) == {*TOOL_FORMATS, NONE} and set(REASONING_PARSERS) == {*REASONING_FORMATS, NONE}
    for called, tools, reasons in VLLM_NAMES:
        server = EngineConfig(model="tiny", tool_call_parser=called, reasoning_parser=reasons).server
        found = formats_of("", tool_parser=server.tool_call_parser, reasoning_parser=server.reasoning_parser)
        assert (found.tools, found.reasoning) == (tools, "think")
    for name, value in (("tool_call_parser", "hermse"), ("reasoning_parser", "thinking")):
        with pytest.raises(ValueError, match=f"{name} must be auto or one of .*; did you mean"):
            EngineConfig(model="tiny", **{name: value})


def test_reasoning_between_marks_of_seed_oss() -> None:
    call = "<seed:tool_call>\n<function=f>\n</function>\n</seed:tool_call>"
    for opened, text in (("<seed:think>", "why </seed:think>" + call), ("", "<seed:think>why</seed:think>\n" + call)):
        found = answer(make_parser(Formats("seed_oss", "seed_oss"), TOOLS, prompt_end=opened), text)
        assert (found.reasoning, found.text, [each.name for each in found.calls]) == ("why", "", ["f"])


CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
TOOLS = [Tool("f")]


def answer(parser: object, text: str) -> Answer:
    found = Answer()
    for letter in text:
        found.add(parser.push(letter))  # type: ignore[attr-defined]
    found.add(parser.finish())  # type: ignore[attr-defined]
    for call in found.calls:
        call.call_id = ""
    return found


def test_where_no_call_may_come_calls_are_text() -> None:
    hermes = Formats("hermes", "think")
    for tools, choice in ((TOOLS, ToolChoice("none")), ([], ToolChoice())):
        assert answer(make_parser(hermes, tools, choice), f"<think>a</think>{CALL}") == Answer(CALL, "a")
    assert isinstance(make_parser(Formats("hermes"), [], ToolChoice()), PlainText)
    header = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    harmony = make_parser(Formats("openai", "harmony"), TOOLS, ToolChoice("none"))
    text = f"<|channel|>analysis<|message|>a<|end|><|start|>assistant{header}{{}}<|call|>"
    assert answer(harmony, text) == Answer("<|start|>assistant" + header + "{}", "a")


def test_without_parallel_calls_the_first_counts() -> None:
    parser = make_parser(Formats("hermes"), TOOLS, ToolChoice(parallel=False))
    assert answer(parser, f"a {CALL}{CALL} b") == Answer("a b", "", [Call("", "f", "{}")])


def test_special_tokens_are_left_out_of_text_but_marks() -> None:
    hidden = ("[TOOL_CALLS]", "</s>", "<pad>", "<pad>2", "")
    tokens = {token: i for i, token in enumerate(hidden)}
    found = formats_of("tools [TOOL_CALLS]", tokens=tokens, hidden=hidden)
    assert found.needs_special_tokens and set(found.left_out) == {"</s>", "<pad>"}
    text = 'a<pad>b</s> < </[TOOL_CALLS] [{"name": "f", "arguments": {"a": "</s>x"}}]</s'
    assert answer(make_parser(found, TOOLS), text) == Answer("ab < </</s", "", [Call("", "f", '{"a": "x"}')])
    seen = formats_of("tools [TOOL_CALLS]", tokens=tokens, hidden=["</s>"])
    assert not seen.needs_special_tokens
    assert answer(make_parser(seen, TOOLS), "a</s>") == Answer("a</s>")


MARKED = {
    "<think>\na\n</think>\n<answer>\nb  c\n</answer>": Answer("b  c", "a"),
    "<think>\n\n</think>\n<answer>\nb\n</answer>\n": Answer("b"),
    "<answer>b</answer> c": Answer("bc"),
    "<think>a</think><answer>b </answ": Answer("b </answ", "a"),
    "<think>a</think><answer>b \n": Answer("b", "a"),
    "<think>a</think>b <answer>c</answer>": Answer("b <answer>c</answer>", "a"),
    "  b <answe": Answer("  b <answe"),
    "": Answer(),
}


@pytest.mark.parametrize("text", MARKED)
def test_an_answer_between_marks(text: str) -> None:
    """HunYuan-A13B's: however it is cut, and with calls in it."""
    formats = Formats("hunyuan_a13b", "hunyuan_a13b")
    found = Answer()
    parser = make_parser(formats)
    found.add([*parser.push(text), *parser.finish()])
    assert found == answer(make_parser(formats), text) == MARKED[text]
    if text.endswith("</answer>") and "b <" not in text:
        calling = text.replace("b  c", '<tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>')
        assert answer(make_parser(formats, TOOLS), calling) == Answer("", "a", [Call("", "f", '{"a": 1}')])


def test_the_prompt_says_whether_reasoning_has_begun() -> None:
    for prompt_end, reasoning in (("<think>\n", "a"), ("<think>\n\n</think>\n\n", ""), ("what is <think>? ", "")):
        found = answer(make_parser(Formats("hermes", "think"), TOOLS, prompt_end=prompt_end), "a</think>b")
        assert found == (Answer("b", "a") if reasoning else Answer("a</think>b"))


def test_ids_of_calls_differ_and_are_of_the_formats_kind() -> None:
    for name, kind in (("hermes", r"call_[0-9a-f]{24}"), ("mistral", r"[0-9a-zA-Z]{9}")):
        texts = {"hermes": CALL, "mistral": "[TOOL_CALLS]f[ARGS]{}"}
        parts = make_parser(Formats(name), TOOLS).push(texts[name] * 20)
        ids = [part.call_id for part in parts if isinstance(part, CallStart)]
        assert len(set(ids)) == 20 and all(re.fullmatch(kind, found) for found in ids)


def test_numbers_of_calls_within_a_turn_are_no_ids() -> None:
    """Command A begins with 0 in each; clients tell calls of several turns apart by their ids."""
    call, begun = '{"tool_call_id": "0", "tool_name": "f", "parameters": {}}', list[str]()
    for text in (f"<|START_ACTION|>[{call}]<|END_ACTION|>", f"<|START_ACTION|>[{call}, {call}]<|END_ACTION|>"):
        found = Answer()
        parser = make_parser(Formats("cohere", NONE), TOOLS)
        found.add(parser.push(text))
        found.add(parser.finish())
        begun += [each.call_id for each in found.calls]
    assert len(set(begun)) == 3 and all(each.startswith("call_") for each in begun)


@pytest.mark.parametrize(("heading", "known"), [("Formats of calls", TOOL_PARSERS), ("Reasoning", REASONING_PARSERS)])
def test_the_page_lists_every_format(heading: str, known: tuple[str, ...]) -> None:
    page = (Path(__file__).parents[2] / "docs/tools.md").read_text()
    section = page.split(f"## {heading}\n")[1].split("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", section, re.M)) == sorted(known)


@pytest.mark.parametrize("name", REASONING_ALIASES)
def test_the_page_lists_other_names_of_reasoning(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs/tools.md").read_text()
    assert f"`{name}`" in page.split("## Reasoning\n")[1].split("\n## ")[0]
    assert formats_of("", reasoning_parser=name).reasoning == REASONING_ALIASES[name]


def test_reasoning_of_olmo_3_by_its_name_elsewhere() -> None:
    assert formats_of("", reasoning_parser="olmo3").reasoning == "think"
