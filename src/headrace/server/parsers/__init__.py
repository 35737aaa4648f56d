"""What a model writes, in parts: reasoning, text, calls of tools. One file a format."""
