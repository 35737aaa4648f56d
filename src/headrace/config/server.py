"""Settings of the HTTP server, and of the watch on its engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from headrace.config.fields import NOT_NEGATIVE, Check, SettingsRecord, at_least, seconds, setting
from headrace.config.served import check_names
from headrace.types import did_you_mean

LogLevel = Literal["auto", "debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
LogRequests = Literal["off", "ends", "params", "text"]
TOOL_PARSERS = ("hermes", "qwen3_coder", "seed_oss", "glm45", "minimax_m2", "deepseek_v3", "deepseek_v31",
                "llama3_json", "mistral", "nemotron_json", "hunyuan_a13b", "cohere", "lfm2", "olmo3", "pythonic",
                "openai", "json", "none")  # fmt: skip
REASONING_PARSERS = ("think", "hunyuan_a13b", "mistral", "seed_oss", "cohere", "harmony", "none")
TOOL_ALIASES = {"llama4_json": "llama3_json", "llama4_pythonic": "pythonic", "qwen3_xml": "qwen3_coder",
                "glm47": "glm45"}  # fmt: skip
REASONING_ALIASES = {"qwen3": "think", "deepseek_r1": "think", "deepseek_v3": "think", "glm45": "think",
                     "minimax_m2": "think", "olmo3": "think", "openai_gptoss": "harmony"}  # fmt: skip
"""vLLM's names of formats -> ours, where these differ."""
OnDisconnect = Literal["stop", "finish"]


def _a_port(name: str, value: Any) -> None:
    if not 0 <= value <= 65535:
        raise ValueError(f"{name} must be between 0 and 65535, got {value}")


def _a_key(name: str, value: Any) -> None:
    if not value.strip():
        raise ValueError(f"{name} must not be empty; leave it out to serve without one")


def _a_parser(known: tuple[str, ...], aliases: dict[str, str]) -> Check:
    def check(name: str, value: Any) -> None:
        if value != "auto" and aliases.get(value, value) not in known:
            near = did_you_mean(value, ("auto", *known))
            raise ValueError(f"{name} must be auto or one of {', '.join(known)}, got {value!r}{near}")

    return check


def _a_file_name(name: str, value: Any) -> None:
    if not value.strip():
        raise ValueError(f"{name} must name a file; leave it out to serve without one")


CALLER_PINS = 8


@dataclass(frozen=True, slots=True)
class ServerSettings(SettingsRecord):
    title: ClassVar[str] = "Server"

    host: str = setting("127.0.0.1", "Address the server binds.", common=True)
    port: int = setting(8000, "Port the server binds.", check=_a_port, common=True)
    api_key: str | None = setting(
        None,
        "Key that clients must send as 'Authorization: Bearer KEY' (all routes but /health).",
        check=_a_key,
        common=True,
        secret=True,
    )
    api_keys_file: str | None = setting(
        None,
        "TOML file of API keys by tenant, each with its limits and chunks of its own (docs/keys.md). SIGHUP reads it "
        "again.",
        check=_a_file_name,
    )
    model_name: str | None = setting(
        None,
        "Name of the model in the API; several, separated by commas, and patterns with *, as in 'tiny,claude-*'. "
        "Default: the model as given.",
        name="served_model_name",
        check=check_names,
    )
    max_connections: int | None = setting(
        None,
        "Connections open at once; then idle ones make room. Default: as file descriptors allow, at most 10,000.",
        check=at_least(1),
        everywhere=True,
    )
    max_queued_requests: int = setting(512, "Requests that may wait; more are refused with 429.", check=at_least(1))
    max_queued_tokens: int = setting(
        1_000_000, "Prompt tokens that may wait; more are refused with 429.", check=at_least(1), unit="tokens"
    )
    cache_control_pins: int = setting(
        CALLER_PINS,
        "Prefixes that one caller's cache_control breakpoints keep in the cache, the latest; 0: none.",
        check=at_least(0),
        rare=True,
    )
    response_store_mb: int = setting(
        64,
        "MiB of memory for responses of /v1/responses that are kept for previous_response_id; 0: none.",
        check=at_least(0),
        rare=True,
        unit="MiB",
    )
    log_level: LogLevel = setting(
        "auto", "Least level of log lines. auto: info for serve, warning for other commands.", everywhere=True
    )
    log_format: LogFormat = setting(
        "text", "json: each log line is a JSON object, with times in UTC and figures as fields.", everywhere=True
    )
    log_requests: LogRequests = setting(
        "ends",
        "Log each request: as it ends; params: also as it arrives, with its parameters; text: and the beginning of "
        "prompt and answer, which may be personal data.",
    )
    log_interval_s: float = setting(
        5.0, "Seconds between status lines while busy, and between lines about refused requests.", check=seconds
    )
    public_prefix_file: str | None = setting(
        None,
        "Text file, such as a system prompt: requests of all cache_salts share the chunks of a prompt that begins "
        "with it. Several: separated by colons.",
    )
    sse_keepalive_s: float = setting(
        10.0,
        "A stream that has nothing to tell for so many seconds, as during a long prefill, sends a comment, so that "
        "proxies keep it open; 0: never.",
        check=NOT_NEGATIVE,
    )
    on_disconnect: OnDisconnect = setting(
        "stop",
        "When a client leaves during its prefill: stop at once, or finish the prefill, so that its retry finds it "
        "cached. A few at a time, and only while no other request waits.",
    )
    shutdown_timeout_s: float = setting(
        10.0,
        "After SIGTERM or ctrl-c requests under way may go on for so many seconds; what is left is then ended.",
        check=NOT_NEGATIVE,
    )
    stable_system_prompt: bool = setting(
        False,
        "On /v1/messages: keep out of the system text what Anthropic's coding client changes in it (a billing header, "
        "the date, git's status), so that prefixes are shared.",
    )
    replay_answers: bool = setting(
        False,
        "Remember the tokens of answers and read them again by these in the conversation's next turn, so that its "
        "prefix stays cached. A prompt's tokens then depend on what the server remembers (docs/server.md).",
    )
    tool_call_parser: str = setting(
        "auto",
        "How the model writes calls of tools: hermes, qwen3_coder, seed_oss, glm45, minimax_m2, deepseek_v3, "
        "deepseek_v31, llama3_json, mistral, nemotron_json, hunyuan_a13b, cohere, lfm2, olmo3, pythonic, openai, json, "
        "or none (calls stay text). auto: as its chat template says.",
        check=_a_parser(TOOL_PARSERS, TOOL_ALIASES),
    )
    reasoning_parser: str = setting(
        "auto",
        "How the model writes its reasoning: think, hunyuan_a13b, mistral, seed_oss, cohere, harmony, or none (it "
        "stays text). auto: as its chat template says.",
        check=_a_parser(REASONING_PARSERS, REASONING_ALIASES),
    )
    restart: bool = setting(True, "Start the engine again after a failure; without it the server ends with code 1.")
    engine_timeout_s: float = setting(
        10.0,
        "An engine process silent for so many seconds counts as hung and is killed.",
        check=seconds,
        everywhere=True,
        rare=True,
    )
    step_timeout_s: float | None = setting(
        None,
        "An engine whose step takes more seconds counts as hung and ends. Default: 600 on a GPU, which may hang "
        "without an error; on a CPU steps may take as long as they do.",
        check=seconds,
        everywhere=True,
        rare=True,
    )
