"""Triton kernels of ops that not every model needs. They hang on `kernels.py`, which passes them on by name."""
