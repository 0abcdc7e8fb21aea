"""Files of models and the numbers packed in them: the hub, safetensors, GGUF, schemes."""
