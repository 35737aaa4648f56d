"""Anthropic's Messages API: its bodies become a Turn, the parts of an answer its blocks and events."""
