"""Where a model's files come from, and how numbers are packed in them: the hub, safetensors, GGUF, schemes."""
