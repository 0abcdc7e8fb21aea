"""Classes of a user's that fail: in the methods that a test names, or for prompts of some lengths."""

from __future__ import annotations

from typing import Any

import torch

from scheduling.policy import CHECKS, Policy

RANK, STEP, END = 5, 7, 9  # tokens of the prompts with which `rank`, a processor and `ended` fail
fails: dict[str, Any] = {}  # the methods that fail, and what each returns; KeyError: it raises one


def failing(name: str) -> Any:
    def method(self: Any, *args: Any) -> Any:
        if name not in fails:
            return getattr(Policy, name)(self, *args)
        if fails[name] is KeyError:
            raise KeyError("my mistake")  # in the line that tests expect
        return fails[name]

    return method


Bad = type("Bad", (Policy,), {"__module__": __name__} | {name: failing(name) for name in CHECKS})


class Picky(Policy):
    def rank(self, request: Any) -> int:
        return None if request.num_prompt == RANK else 0

    def ended(self, seq: Any) -> None:
        assert seq.group.num_prompt != END, "no nine"


class Own(Policy):
    def __init__(self, config: Any):
        self.name = "calls no other"


class Processor:
    def __init__(self, config: Any):
        self.vocab_size = config.vocab_size

    def __call__(self, logits: torch.Tensor, slots: torch.Tensor, state: Any) -> torch.Tensor:
        if "__call__" in fails:
            return fails["__call__"]
        if logits.device.type == "cpu" and (state.num_known[slots.long()] == STEP).any():
            return logits[:, 1:]
        return logits


class Proposer:
    def __init__(self, config: Any, k: int):
        self.k = k

    def propose(self, state: Any) -> torch.Tensor:
        if state.num_known.device.type == "cpu" and (state.num_known == STEP).any():
            raise KeyError("seven")
        return torch.zeros(len(state.num_known), self.k + ("propose" in fails), dtype=torch.int32)
