"""The commands of `headrace chat`: lines that begin with a slash. A new one is a function and a line of COMMANDS."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from headrace.cli.conversation import Conversation
from headrace.console import err
from headrace.types import CHUNK, did_you_mean


class Command(NamedTuple):
    """run(conversation, llm, what follows the name) gives the lines to tell; None: `obey` does it."""

    usage: str
    help: str
    run: Callable[[Conversation, Any, str], str] | None = None


def obey(line: str, conversation: Conversation, llm: Any) -> bool:
    """Does what a line with a command says; False: the chat ends. Raises ValueError where it cannot."""
    name, _, rest = line.partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        raise ValueError(_unknown(name))
    if command.run is None:
        return False
    err.print(command.run(conversation, llm, rest.strip()), style="dim", markup=False)
    return True


def _unknown(name: str) -> str:
    meant = did_you_mean(name, COMMANDS) or ";"
    return f"no command {name}{meant} /help lists them; to send a line that begins with a slash, begin it with two"


def _help(conversation: Conversation, llm: Any, rest: str) -> str:
    told = {command.usage: command.help for command in COMMANDS.values()} | OTHERS
    width = max(map(len, told))
    return "\n".join(f"{usage:{width}}  {text}" for usage, text in told.items())


def _stats(conversation: Conversation, llm: Any, rest: str) -> str:
    prompt, cached, last = conversation.prompt_tokens, conversation.cached_tokens, conversation.last
    earlier = f" ({conversation.all_turns} with earlier conversations)"
    lines = [f"turns: {conversation.turns}" + (earlier if conversation.all_turns > conversation.turns else "")]
    if last is not None:
        speed = last.decode_tokens_per_s
        at = f" at {speed:.1f} tokens/s" if speed else ""
        lines += [
            f"prompts: {prompt:,} tokens, {cached:,} of them from the cache ({_share(cached, prompt)})",
            f"answers: {conversation.output_tokens:,} tokens",
            f"last answer: {last.output_tokens:,} tokens{at}, the first after {last.ttft_s:.3f} s",
        ]
    kv, room = llm.stats.kv, llm.capacity.kv_cache_tokens
    held = min((kv.chunks_used + kv.chunks_cached) * CHUNK, room)
    return "\n".join([*lines, f"KV cache: {held:,} of {room:,} tokens in use ({_share(held, room)})"])


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "0%"


def _system(conversation: Conversation, llm: Any, rest: str) -> str:
    if not rest:
        shown = conversation.system
        return "no system prompt; /system TEXT sets one" if shown is None else f"system prompt: {shown}"
    conversation.begin(None if rest == "-" else rest)
    return f"system prompt {'removed' if rest == '-' else 'set'}; a new conversation begins"


def _reset(conversation: Conversation, llm: Any, rest: str) -> str:
    conversation.begin(conversation.system)
    return "a new conversation begins" + (", with the same system prompt" if conversation.system is not None else "")


def _saver(replace: bool) -> Callable[[Conversation, Any, str], str]:
    def save(conversation: Conversation, llm: Any, rest: str) -> str:
        if not rest:
            raise ValueError("/save needs a file, ending in .md or .json")
        path = Path(rest).expanduser()
        conversation.save(path, replace=replace)
        return f"{len(conversation.messages)} messages written to {path}"

    return save


COMMANDS = {
    "/help": Command("/help", "show this", _help),
    "/stats": Command("/stats", "turns, tokens, share from the cache, KV cache in use, speed", _stats),
    "/system": Command("/system [TEXT]", "show the system prompt, or set it (- removes it) and begin anew", _system),
    "/save": Command("/save FILE", "write the conversation to a new file, .md or .json", _saver(False)),
    "/save!": Command("/save! FILE", "the same, in place of a file that is there", _saver(True)),
    "/reset": Command("/reset", "forget the conversation, keep the system prompt", _reset),
    "/exit": Command("/exit, /quit", "leave, as ctrl-d does"),
    "/quit": Command("/exit, /quit", "leave, as ctrl-d does"),
}
"""By name, in the order of /help."""

OTHERS = {
    "ctrl-c": "stop an answer; its turn is forgotten",
    "... \\": "a backslash at the end of a line: the turn goes on in the next",
    "//...": "a turn that begins with a slash",
}
"""What /help tells besides: usage -> help."""
