"""Towers: logits of prompts with images against transformers, however these run."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from oracle_checks import make_worker
from seeing_cases import CASES, KEPT, answer, folder_of, pictures_of

TIERS = [name if name in KEPT else pytest.param(name, marks=pytest.mark.full) for name in CASES]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", TIERS)
def test_prompts_with_images_equal_transformers(shared: Path, name: str, backend: str) -> None:
    """Whole, and cut inside an image."""
    folder, case = folder_of(name, shared), CASES[name]
    oracle = load_file(folder / "oracle.safetensors")
    pictures, worker = pictures_of(case, oracle), make_worker(folder, backend=backend, max_model_len=128)
    for cuts in ((), (pictures[-1].spans[-1].begin + 1,)):
        logits, tokens = answer(worker, case, pictures, cuts)
        assert (logits - oracle["logits"]).abs().max() <= 1e-4
        assert tokens == oracle["tokens"].tolist()
