"""Speculative decoding: proposers of drafts, which the next step of the model verifies (Leviathan et al., 2023)."""
