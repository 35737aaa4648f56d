"""GGUF files (ggml's format): facts and tensors of a model in one file, or in numbered parts of one."""
