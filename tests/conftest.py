"""Shared by the tests that run the bundled demo model."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

import cpu
from config import DEMO, SamplingParams
from engine import LLM
from tasks import Tasks

torch.set_num_threads(2)
if "PYTEST_XDIST_WORKER" in os.environ:  # two processes with two threads each would mostly wait for each other
    settle = cpu.settle
    cpu.settle = lambda threads, *more: settle(threads or 1, *more)
    torch.set_num_threads(1)
# A GPU machine may hold no more than `LLM` needs. Where requirements.txt is installed nothing is left out.
SERVED = [
    "test_server.py", "test_protocol.py", "test_replies.py", "test_processes.py", "test_client.py", "test_survival.py",
    "test_executor.py", "test_data_parallel.py", "test_torchrun.py", "test_bench_serve.py",
]  # fmt: skip
collect_ignore = [] if find_spec("flask") else SERVED


@pytest.fixture(scope="session")
def make_llm():
    """Makes an `LLM` on the demo in float32, with other options where given."""
    return lambda **fields: LLM(DEMO, **({"dtype": "float32", "device": "cpu"} | fields))


@pytest.fixture(scope="session")
def llm(make_llm):
    return make_llm()


@pytest.fixture
def engine() -> Any:
    """A `ScriptedClient`, and so an engine that answers without a model."""
    from scripted import ScriptedClient  # here, because it brings the server's requirements

    return ScriptedClient()


@pytest.fixture
def http_client(engine: Any) -> Any:
    """A client of the Flask app around that engine."""
    from scripted import client_of

    return client_of(engine)


@pytest.fixture(scope="session")
def conversations() -> list[list[dict[str, str]]]:
    """Fifty conversations of all five tasks, the recalls among them up to some 800 tokens long."""
    words = "amber bridge candle dragon ember forest garden hollow island jungle kettle lantern meadow needle orchard"
    lines = "\n".join(f"The {a} was by the {b}, and nobody saw it." for a in words.split() for b in words.split())
    tasks, made = Tasks(lines, seed=5), []
    for i in range(50):
        task = ("sum", "difference", "spell", "repeat", "recall")[i % 5]
        turns = tasks.conversation(300 * (i // 5 % 5) + 100) if task == "recall" else [getattr(tasks, task)()]
        messages = []
        for question, answer in turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        made.append(messages[:-1])
    return made


@pytest.fixture(scope="session")
def work(llm, conversations) -> tuple[list[list[int]], list[SamplingParams]]:
    """The conversations, and between them prompts with long answers."""
    prompts, params = [], []
    greedy = SamplingParams(temperature=0, max_tokens=48)
    story = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    for i, conversation in enumerate(conversations):
        prompts.append(llm.tokenizer.encode(llm.tokenizer.render(conversation), add_special_tokens=False))
        prompts.append(llm.tokenizer.encode(f"Enter the {i}th SERVANT, with a torch.\n\n"))
        params += [greedy, story]
    return prompts, params


@pytest.fixture(scope="session")
def answers(llm, work) -> list[list[int]]:
    """What the demo makes of them, all in one batch with the cache on."""
    return [output.outputs[0].token_ids for output in llm.generate(*work, use_tqdm=False)]


@pytest.fixture
def products_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter multiplies by NumPy, of whose products a row's bits can depend on where it is in a tile (on
    CPUs without AVX-512, and some with it). On a GPU they do not; here each row is multiplied by itself."""
    matmul = np.matmul

    def by_rows(a: np.ndarray, b: np.ndarray, **options: Any) -> np.ndarray:
        return matmul(a[..., None, :], b[..., None, :, :], **options)[..., 0, :]

    monkeypatch.setattr(np, "matmul", by_rows)


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter runs programs one after the other: 6 of attention_decode instead of 2 on each of 132."""
    kernels = pytest.importorskip("kernels")
    if not torch.cuda.is_available():
        monkeypatch.setattr(kernels, "_decode_programs", lambda device, kv_heads: 6)
