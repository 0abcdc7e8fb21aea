"""Adapters: many small changes of one model, each of them for the requests that name it (LoRA, Hu et al., 2021)."""
