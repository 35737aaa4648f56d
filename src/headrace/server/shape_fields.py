"""The shape of an answer in request bodies: OpenAI's response_format, vLLM's structured_outputs and older fields."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from headrace.server.errors import invalid
from headrace.server.strict import Strict
from headrace.structured import Structured
from headrace.types import InvalidRequest

FORMATS = ("text", "json_object", "json_schema")


class NamedSchema(Strict):
    """strict: the answer follows the schema either way."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @field_validator("type", mode="before")
    @classmethod
    def _is_known(cls, value: Any) -> Any:
        if isinstance(value, str) and value not in FORMATS:
            known = ", ".join(FORMATS[:-1])
            raise ValueError(
                f"{value[:40]!r} is not supported, only {known} and {FORMATS[-1]}; structured_outputs takes a grammar"
            )
        return value

    def check(self) -> None:
        """Raises ApiError for a type without its schema, or a schema without its type."""
        if (self.json_schema is not None) != (self.type == "json_schema"):
            told = "type json_schema needs json_schema, and no other type has it"
            raise invalid(f"response_format: {told}", "response_format")
        if self.json_schema is not None and self.json_schema.schema_ is None:
            raise invalid("response_format.json_schema.schema is required", "response_format", "missing")

    def structured(self) -> Structured:
        """Of a type other than text."""
        return Structured(json_object=True) if self.json_schema is None else Structured(json=self.json_schema.schema_)


class StructuredOutputs(Strict):
    """The fields of Structured; exactly one of them."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def structured(self) -> Structured:
        return Structured(self.json_, bool(self.json_object), self.regex, self.choice, self.grammar)


GUIDED: dict[str, str] = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
}  # fmt: skip
"""vLLM's older fields -> that of Structured."""


class ShapedBody(Strict):
    """The fields of a body that give the answer a shape."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def shape(self) -> Structured | None:
        """Raises ApiError naming the field, or the two that both give a shape."""
        name = self.shape_field
        if self.response_format is not None:
            self.response_format.check()
        if name is None:
            return None
        try:
            if name in GUIDED:
                return Structured(**{GUIDED[name]: getattr(self, name)})
            given: ResponseFormat | StructuredOutputs = getattr(self, name)
            return given.structured()
        except InvalidRequest as error:
            raise invalid(f"{name}: {error}", name) from None

    @property
    def shape_field(self) -> str | None:
        """The field that gives a shape."""
        given = [name for name in ("structured_outputs", *GUIDED) if getattr(self, name) is not None]
        if self.response_format is not None and self.response_format.type != "text":
            given.insert(0, "response_format")
        if given[1:]:
            raise invalid(f"{given[0]} and {given[1]} both give the answer a shape; give one", given[1])
        return given[0] if given else None
