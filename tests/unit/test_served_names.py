"""Names by which the model may be called."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import EngineConfig
from headrace.config.served import ServedNames, matches

pytestmark = pytest.mark.unit


def test_several_names_and_patterns() -> None:
    served = EngineConfig(served_model_name="tiny, gpt-4o,claude-*,*-latest,tiny").served
    assert served == ServedNames(("tiny", "gpt-4o"), ("claude-*", "*-latest")) and served.main == "tiny"
    assert all(name in served for name in ("tiny", "gpt-4o", "claude-opus-9", "claude-", "x-latest"))
    assert not any(name in served for name in ("", "Tiny", "gpt-4o2", "aclaude-1", "x-latest ", None))


def test_without_the_setting_the_model_is_called_as_it_was_given() -> None:
    assert EngineConfig(model="/a,b/*").served == ServedNames(("/a,b/*",))


@pytest.mark.parametrize("given", ["", "a,", ",", "*", "claude-*,*"])
def test_no_name_to_list_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="served_model_name"):
        EngineConfig(served_model_name=given)


@given(st.text("ab", max_size=8), st.text("ab*", max_size=6))
def test_patterns_match_as_expressions_do(name: str, pattern: str) -> None:
    wanted = re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name) is not None
    assert "*" not in pattern or matches(name, pattern.split("*")) == wanted


def test_hostile_names_take_no_time() -> None:
    assert not matches("a" * 1_000_000, ("*a" * 20 + "*b").split("*"))  # an expression would take years


def test_adapters_are_models_by_their_own_names() -> None:
    served = EngineConfig(served_model_name="base,*", lora_modules="sql=a/b=c, legal = d").served
    assert served.adapters == ("sql", "legal") and served.main == "base"
    assert [served.adapter(name) for name in ("sql", "legal", "base", "else", None)] == ["sql", "legal", "", "", ""]
    assert "sql" in ServedNames.of("base", "m", ("sql",)) and "sqlx" not in ServedNames.of("base", "m", ("sql",))
    assert EngineConfig(lora_modules="sql=a/b=c, legal = d").adapters.each == (("sql", "a/b=c"), ("legal", "d"))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("", "must be name=folder"), ("sql", "must be name=folder"), ("sql=", "must be name=folder"),
        ("=a", "must be name=folder"), ("sql=a,", "must be name=folder"), ("sql=a,sql=b", "two adapters called 'sql'"),
        ("sql*=a", "has no *"), ("tiny=a", "'tiny' is the model's own name"), ({"sql": "a"}, "must be a text"),
    ],
)  # fmt: skip
def test_adapters_that_cannot_be_are_refused(given: object, told: str) -> None:
    with pytest.raises(ValueError, match=f"lora_modules.*{re.escape(told)}"):
        EngineConfig(model="tiny", lora_modules=given)
