"""Text to token ids and back, through the model's own tokenizer and chat template.

Decoding token by token needs the bytes of each token. Tokenizers whose decoder works token by token (byte-level BPE;
the sentencepiece kinds with the space mark and byte fallback) have a rule for that (pieces.py); for the others the
detokenizer decodes small windows.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.engine import tiktoken_file
from headrace.engine.pieces import piece_rule
from headrace.engine.plain_messages import plain_messages
from headrace.engine.template_file import given_template
from headrace.engine.templates import Renderer
from headrace.engine.tokenizer_file import follow
from headrace.logs import shown
from headrace.models.files import is_gguf, read_json
from headrace.texts import check_text
from headrace.types import InvalidRequest, UnsupportedModel

_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json", tiktoken_file.NAME,
)  # fmt: skip
_PLAIN = {"PreTrainedTokenizerFast", "TokenizersBackend"}
"""Names, in tokenizer_config.json, of the class that takes tokenizer.json as it is."""
_PLAIN_MODELS = {"falcon", "llama", "opt", "qwen3"}
"""Model types for which AutoTokenizer believes these names, whatever else is in the folder."""
_TEMPLATE_OPTIONS = {"documents", "continue_final_message"}
"""Options of transformers' apply_chat_template that a request may set; its other options are not the user's to set."""

NO_TEMPLATE = (
    "the model has no chat template, so it cannot take messages; send a plain prompt (headrace generate, or POST "
    "/v1/completions), or give one with chat_template (--chat-template FILE), or put it as chat_template.jinja "
    "into the model's folder, of a GGUF file beside it"
)
NO_LIMIT = 1 << 62
"""model_max_length of a tokenizer, which transformers only warns by; the model's own length is what counts."""


class Tokenizer:
    """The tokenizer of one model folder. Safe to share between threads once built. template: a file with the chat
    template that it has in place of the folder's.

    Raises FileNotFoundError where the folder has no tokenizer, ValueError where it cannot be loaded; both name the
    folder. Code that comes with a model is never run, and nothing is downloaded.
    """

    def __init__(self, folder: str | Path, template: str | Path | None = None) -> None:
        if not has_tokenizer(folder):
            raise FileNotFoundError(
                f"{folder} has no tokenizer (none of {', '.join(_FILES)}); add the model's tokenizer files, "
                f"or send token ids instead of text"
            )
        self._hf: Any = _load(folder)
        if template is not None:
            self._hf.chat_template = self._kept_templates() | {"default": given_template(Path(template))}
        backend = getattr(self._hf, "backend_tokenizer", None)
        self._rule = piece_rule(backend.decoder) if backend is not None else None
        self._special = {token for token, added in self._hf.added_tokens_decoder.items() if added.special}
        self._bytes: dict[int, bytes] = {}
        self._renderer = Renderer()

    @classmethod
    def load(cls, folder: str | Path, template: str | Path | None = None) -> Tokenizer | None:
        """The folder's tokenizer, None where it has none: the model then takes and gives token ids only. Raises
        ValueError for a template that none takes."""
        if has_tokenizer(folder):
            return cls(folder, template)
        if template is not None:
            raise ValueError(f"chat_template: {folder} has no tokenizer, so it cannot take messages; leave it out")
        return None

    # ---- facts -------------------------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included. The model's logits may be wider (padding)."""
        return len(self._hf)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token by its text as the tokenizer writes it, added ones included."""
        found: dict[str, int] = self._hf.get_vocab()
        return found

    @property
    def eos_token_id(self) -> int | None:
        token: int | None = self._hf.eos_token_id
        return token

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    @property
    def chat_template(self) -> str:
        """The template of conversations with tools, where the model has one of its own for them; empty: none."""
        templates = self._hf.chat_template or ""
        if isinstance(templates, dict):
            return str(templates.get("tool_use") or templates.get("default") or "")
        return str(templates)

    @property
    def rerank_template(self) -> str:
        """How a query and a document become one text, with {query} and {document} in it: the template that the model
        has under the name rerank, as llama.cpp writes it. Empty: none."""
        templates = self._hf.chat_template
        return str(templates.get("rerank") or "") if isinstance(templates, dict) else ""

    def _kept_templates(self) -> dict[str, str]:
        """Those that are of no conversations."""
        return {"rerank": self.rerank_template} if self.rerank_template else {}

    @property
    def named_tokens(self) -> dict[str, str | None]:
        """Texts of the tokens that begin a text, end it and fill it up; None where the model has no such token."""
        return {name: getattr(self._hf, name) for name in ("bos_token", "eos_token", "pad_token")}

    @property
    def added_tokens(self) -> dict[str, int]:
        """Tokens beside the learnt vocabulary, by their text."""
        return {added.content: token for token, added in self._hf.added_tokens_decoder.items()}

    @property
    def special_tokens(self) -> frozenset[str]:
        """Those of them that skip_special_tokens leaves out."""
        return frozenset(added.content for added in self._hf.added_tokens_decoder.values() if added.special)

    @property
    def has_pieces(self) -> bool:
        """Whether token_bytes is the exact part of a token in any text, so that text can be built token by token."""
        return self._rule is not None

    def as_json(self) -> str:
        """The tokenizer as the tokenizers library writes it, added tokens included. Raises ValueError where it is of
        another library."""
        backend = getattr(self._hf, "backend_tokenizer", None)
        if backend is None:
            raise ValueError("the tokenizer is none of the tokenizers library")
        plain = type(backend).from_str(backend.to_str())
        plain.no_padding()
        plain.no_truncation()
        return str(plain.to_str())

    def is_special(self, token: int) -> bool:
        """Whether skip_special_tokens leaves this token out."""
        return token in self._special

    # ---- text to tokens ----------------------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """Token ids of `text`, by default with the special tokens that the tokenizer puts around a text.

        Raises InvalidRequest naming `param` for anything but a well-formed string.
        """
        check_text(text, param)
        return list(self._hf(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])

    def apply_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation: `render_chat`, encoded. The template writes the special tokens itself, so none
        are added. Raises InvalidRequest as `render_chat` does."""
        return self.encode_chat(self.render_chat(messages, add_generation_prompt, tools, **template_kwargs))

    def encode_chat(self, text: str) -> list[int]:
        """Token ids of what `render_chat` gave."""
        return self.encode(text, add_special_tokens=False, param="messages")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """A conversation as the model's chat template writes it, in transformers' jinja sandbox, in a process of its
        own with limits of time, memory and output (`Renderer`).

        `content` is a string or a list of text parts, which are joined by a newline. `template_kwargs` are variables of
        the template (enable_thinking, say). Raises InvalidRequest for a model without template, bad messages, whatever
        the template refuses, and a rendering beyond a limit.
        """
        if not self.has_chat_template:
            raise InvalidRequest(NO_TEMPLATE, "messages")
        self._check_template_kwargs(template_kwargs)
        if tools is not None and not (isinstance(tools, Sequence) and all(isinstance(tool, Mapping) for tool in tools)):
            raise InvalidRequest("tools must be a list of JSON objects", "tools")
        return self._render(plain_messages(messages), add_generation_prompt, tools, template_kwargs)

    def warm_up(self) -> None:
        """Starts what the first conversation would wait for."""
        if self.has_chat_template:
            self._renderer.warm()

    def close(self) -> None:
        """Ends the processes that render conversations, those under way too."""
        self._renderer.close()

    def _check_template_kwargs(self, template_kwargs: Mapping[str, Any]) -> None:
        reserved = set(inspect.signature(self._hf.apply_chat_template).parameters) - _TEMPLATE_OPTIONS
        if bad := sorted(reserved & set(template_kwargs)):
            raise InvalidRequest(f"{bad[0]!r} is not a variable of the chat template", "chat_template_kwargs")

    def _render(self, messages: list[dict[str, Any]], generate: bool, tools: Any, variables: dict[str, Any]) -> str:
        """As transformers' apply_chat_template does, for which a missing value and None are the same."""
        if generate and variables.get("continue_final_message"):
            raise InvalidRequest("continue_final_message needs add_generation_prompt to be false", "messages")
        listed = list(tools) if tools else None
        try:
            template = self._hf.get_chat_template(None, listed)
        except ValueError as error:
            raise InvalidRequest(f"the model's chat templates cannot be used: {error}", "messages") from None
        if listed and "tools" not in template:
            told = "the model's chat template shows no tools: tell them in the system message"
            raise InvalidRequest(told, "tools")
        present = [{name: value for name, value in m.items() if value is not None} for m in messages]
        return self._renderer.render(template, present, listed, generate, {**self._hf.special_tokens_map, **variables})

    # ---- tokens to text ----------------------------------------------------------------------------------------------

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of a token sequence, spaces as the model wrote them (no clean-up)."""
        text: str = self._hf.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def token_text(self, token: int) -> str:
        """Text of one token by itself, special tokens included; U+FFFD where it holds only a part of a character."""
        if self.has_pieces:
            return self.token_bytes(token).decode("utf-8", "replace")
        return self.decode([token], skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        """Bytes of one token as it stands inside a text; empty for an id that the vocabulary does not have."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._make_bytes(token)
        return known

    def _make_bytes(self, token: int) -> bytes:
        if self._rule is None:
            return self.decode([token], skip_special_tokens=False).encode()
        piece = self._hf.convert_ids_to_tokens(token) if 0 <= token < 2**31 else None
        return b"" if piece is None else self._rule(piece)


def has_tokenizer(folder: str | Path) -> bool:
    """Whether the model folder holds a tokenizer's vocabulary, or the GGUF file or the folder that it lies in."""
    if is_gguf(Path(folder)):
        from headrace.engine import gguf_tokenizer

        return _beside(Path(folder)) or gguf_tokenizer.has_vocabulary(Path(folder))
    return any((Path(folder) / name).is_file() for name in _FILES)


def _beside(model: Path) -> bool:
    """Whether a tokenizer.json lies beside a GGUF file: it goes before the file's own vocabulary."""
    return (model.parent / "tokenizer.json").is_file()


def _load(folder: str | Path) -> Any:
    model = Path(folder)
    own = is_gguf(model)
    folder = model.parent if own else model
    for path in folder.iterdir() if not own or _beside(model) else ():
        if not path.is_file() and not path.is_dir():
            raise ValueError(f"{path} is not a regular file, and opening it might wait for ever; take it away")
    try:
        made = _of_gguf(model) if own else _of_folder(folder)
        _try_out(made)
        return made
    except (KeyboardInterrupt, SystemExit, UnsupportedModel):
        raise
    except BaseException as error:  # every kind of error over a broken file, and panics of tokenizers' Rust
        raise ValueError(_told(model, shown(error))) from error


def _told(model: Path, error: str) -> str:
    """What is wrong with its tokenizer, with the place and a remedy; many errors have both."""
    if str(model) not in error:
        return f"cannot load the tokenizer of {model}: {error}; check its files"
    return f"cannot load the tokenizer: {error}{'' if '; ' in error else '; check its files'}"


def _of_gguf(model: Path) -> Any:
    if _beside(model):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(model.parent), local_files_only=True)
    from headrace.engine import gguf_tokenizer

    return gguf_tokenizer.load_tokenizer(model)


def _of_folder(folder: Path) -> Any:
    if tiktoken_file.is_there(folder):
        return tiktoken_file.load_tokenizer(folder)
    options = dict(trust_remote_code=False, local_files_only=True)
    wrong = _cuts_wrongly(folder)
    made = _loader(folder).from_pretrained(str(folder), **options | ({"fix_mistral_regex": True} if wrong else {}))
    if not wrong:
        follow(made, folder)
    return made


def _cuts_wrongly(folder: Path) -> bool:
    """Whether tokenizer.json may cut text into other words than the model has learned: that of Mistral Small 3 and its
    kin, as transformers 4 wrote it. transformers 5 puts it right, where it is asked to."""
    try:
        model = read_json(folder / "config.json").get("model_type")
    except ValueError:
        return False  # whoever loads the folder says what is wrong
    return model == "mistral3" and (folder / "tokenizer.json").is_file()


def _loader(folder: Path) -> Any:
    """What loads the folder's tokenizer: AutoTokenizer, or the class it is known to choose, which is had without the
    processor time that importing AutoTokenizer takes, and torch with it."""
    if _is_plain(folder):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _is_plain(folder: Path) -> bool:
    try:
        model, given = read_json(folder / "config.json"), read_json(folder / "tokenizer_config.json")
    except ValueError:
        return False  # AutoTokenizer says what it thinks of it
    kinds = (given.get("tokenizer_class"), model.get("model_type"))
    if not all(isinstance(kind, str) for kind in kinds) or "auto_map" in given or "model_name" in model:
        return False
    return kinds[0] in _PLAIN and kinds[1] in _PLAIN_MODELS


def _try_out(made: Any) -> None:
    """Uses once what is used later, so that wrong values in its files show now. Not in a thread: transformers clears
    stored truncation and padding on first use."""
    made.model_max_length = NO_LIMIT
    tokens = made("the quick brown fox", verbose=False)["input_ids"]
    made.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    len(made)
    templates = made.chat_template
    listed = list(templates.values()) if isinstance(templates, dict) else [templates or ""]
    if not all(isinstance(template, str) for template in listed):
        raise ValueError("chat_template must be a text, or texts by name")
    for name, given in made.special_tokens_map.items():
        if not all(isinstance(token, str) for token in (given if isinstance(given, list) else [given])):
            raise ValueError(f"{name} must be a text")
    if not isinstance(made.eos_token_id, int | None):
        raise ValueError("eos_token must be one token")
