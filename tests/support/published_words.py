"""How the published models' own tokenizers cut text into words, as the tokenizers library is told it, by what a GGUF
file calls it (`tokenizer.ggml.pre`). Facts: tokenizer.json, patterns of tiktoken, and llama.cpp's src/llama-vocab.cpp.
Nothing here is taken from headrace's reader."""

from __future__ import annotations

from typing import Any

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
BYTES_OF_WORDS = BYTES | {"use_regex": True}
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NEMO = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(*regexes: str, digits: bool = False) -> list[dict[str, Any]]:
    cuts = [{"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False} for each in regexes]
    return [*cuts, *([{"type": "Digits", "individual_digits": True}] * digits), BYTES]


DIGITS = [{"type": "Digits", "individual_digits": True}, BYTES_OF_WORDS]
FALCON = [
    {"type": "Punctuation", "behavior": "Contiguous"}, BYTES_OF_WORDS, {"type": "Digits", "individual_digits": False},
    split("[0-9][0-9][0-9]")[0],
]  # fmt: skip
LINES, HAN = "[\r\n]", "[一-龥ࠀ-一가-\ud7ff]+"
WITH_CASE = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿ\u0386Έ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ"
    "\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
V3 = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
    " ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
KIMI = (
    r"[\p{Han}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
THREES = r"(?<!\p{N})\p{N}{1,2}(?=(?:\p{N}{3})+(?!\p{N}))|\p{N}{1,3}"
WITHOUT_SPACES = (
    "[一-鿿㐀-䶿豈-\ufaff\u3040-ゟ゠-ヿ･-ﾟ⼀-\u2fdfเ-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+"
)
SCRIPTS = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-\u303f︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+"
PHRASES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
SEED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
JAIS2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|"
    r"\s{1,2}(?!\S)|\s{1}"
)
LLAMAS = ("llama-bpe", "llama3", "llama-v3", "lfm2", "falcon3", "falcon-h1", "pixtral", "midm-2.0")
PUBLISHED: dict[str, list[dict[str, Any]]] = {
    **{name: [BYTES_OF_WORDS] for name in ("gpt-2", "phi-2", "olmo", "exaone4", "gigachat", "a.x-4.0", "mellum")},
    **dict.fromkeys(("smollm", "refact", "starcoder", "command-r", "minerva-7b", "mellum2"), DIGITS),
    "falcon": FALCON, "default": FALCON,
    **dict.fromkeys(LLAMAS, split(CL100K)),
    "smaug-bpe": split(CL100K), "dbrx": split(CL100K), "glm4": split(CL100K), "chatglm-bpe": split(CL100K),
    "jais-2": split(JAIS2),
    "minicpm5": split("\\p{N}{1,3}", CL100K.replace("{1,3}", "+")),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2", "kanana2"), split(O200K)), "tekken": split(NEMO),
    "tiny_aya": split(r"\d{1,3}(?=(?:\d{3})*\b)", O200K), "kimi-k2": split(KIMI),
    "afmoe": split(THREES, WITHOUT_SPACES, V3),
    "youtu": split(SCRIPTS, O200K.replace("{1,3}", "")), "exaone-moe": split(PHRASES), "seed-coder": split(SEED),
    "qwen2": split(CL100K.replace("{1,3}", "")), "deepseek-r1-qwen": split(CL100K.replace("{1,3}", "")),
    "hunyuan": split(CL100K.replace("{1,3}", "")),
    "deepseek-llm": split(
        LINES, f"\\s?[{WITH_CASE}]+", "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", "\\s+$", HAN, digits=True
    ),
    "deepseek-coder": split(LINES, "\\s?\\p{L}+", "\\s?\\p{P}+", HAN, digits=True),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm"), split("\\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", V3)
    ),
    "qwen35": split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+"
    ),
}  # fmt: skip
"""The pre_tokenizer of the models' own tokenizer.json, or of their tiktoken's pattern, by what a GGUF file calls it."""
NORMAL_FORM = ("olmo", "command-r", "qwen2", "deepseek-r1-qwen", "qwen35", "hunyuan")
WHOLE = (*LLAMAS, "smaug-bpe", "tekken")
WHOLE += ("minicpm5", "hunyuan", "kimi-k2", "youtu")
