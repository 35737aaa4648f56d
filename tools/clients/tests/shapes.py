"""What all clients are asked for: a schema, tools, and what their answers must be."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MODEL = "tiny"


class City(BaseModel):
    """A city."""

    # Closed and bounded: the shipped model would write on where it may.
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=16)
    country: Literal["France", "Portugal", "Austria"]
    inhabitants: int = Field(ge=0, le=9_999_999)
    capital: bool


def get_weather(city: Annotated[str, Field(max_length=16)]) -> str:
    """The weather of a city."""
    return f"21 degrees in {city}"


def population(city: str) -> int:
    """How many live in a city."""
    return 2_100_000


WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 16}, "unit": {"type": "string", "enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
CODE: dict[str, Any] = {
    "type": "object",
    "properties": {"code": {"type": "integer", "minimum": 1000, "maximum": 9999}},
    "required": ["code"],
    "additionalProperties": False,
}


def tool(name: str, parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    """As /v1/chat/completions takes it."""
    told = {"name": name, "description": f"tells {name}", "parameters": parameters, **more}
    return {"type": "function", "function": told}


TOOLS = [tool("get_weather", WEATHER), tool("get_code", CODE)]
ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]


def check_weather(arguments: dict[str, Any]) -> None:
    assert set(arguments) == {"city", "unit"} and arguments["unit"] in ("C", "F"), arguments
    assert isinstance(arguments["city"], str)


def check_code(arguments: dict[str, Any]) -> None:
    assert set(arguments) == {"code"} and 1000 <= arguments["code"] <= 9999, arguments
