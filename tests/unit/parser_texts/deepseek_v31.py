"""DeepSeek-V3.1: its parser reads the calls of V3, too."""

from tests.unit.parser_texts.deepseek_v3 import CASES

__all__ = ["CASES"]
