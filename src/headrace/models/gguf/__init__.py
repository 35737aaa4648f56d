"""GGUF files (ggml's format): facts, tokenizer fields and tensors of a model in one file, or in numbered parts of one."""
