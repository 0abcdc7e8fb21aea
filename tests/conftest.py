"""Shared by all tests: which of them run, where kernels run, and the bundled demo model.

There are three tiers. Without `-m`, what is marked `full` or `long` is left out; `-m full` and `-m long` run the tests
that are so marked.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

from config import DEMO, visible_gpus
from engine import LLM
from sampling_params import SamplingParams
from tasks import Tasks

# A machine may be slow, and other programs may run beside the tests.
settings.register_profile("manta", deadline=None)
settings.load_profile("manta")
# torch takes seconds to load. Many tests do without it, so here it is imported where it is used.
if GPU := bool(visible_gpus()):
    import torch

    GPU = torch.cuda.is_available()
# A process either compiles kernels or interprets them. Triton decides which when the tests import it.
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
# Two processes with two threads each would mostly wait for each other.
THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
# What only requirements-full.txt brings, as Python imports it.
ORACLES = {"axe_playwright_python", "build", "google", "playwright", "sentencepiece", "tiktoken"}
# The files that take longest. Processes that share the tests begin with them, so that both end at about the same time.
LONGEST = [
    "test_compile_gate.py", "test_families.py", "test_executor.py", "test_engine.py", "test_torchrun.py",
    "test_upkeep.py", "test_memory.py", "test_cpu_compiled.py", "test_survival.py", "test_tools.py", "test_house.py",
    "test_client.py", "test_hostile.py", "test_grammar.py", "test_worker.py",
]  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "interpreted: runs kernels on a CPU, in Triton's interpreter")
    if GPU:  # whose machine may have any versions of what warns: there a warning is printed
        config.addinivalue_line("filterwarnings", "default")
    config.option.loadscopereorder = False  # else pytest-xdist begins with the files of the most tests
    # What a shell starts in the background ignores Ctrl-C, and so would the processes that tests start and interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the longest files, and leave out the other tiers and what a GPU's process may not run.

    A tier runs only where `-m` names it. `-m gpu` takes `full` along, because a GPU's time is dear, but no campaign.
    Interpreted kernels need a process without a GPU: test_gpu.py starts one for them.
    """
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
    asked = set(re.findall(r"\w+", config.option.markexpr))
    apart = ["interpreted"] * GPU + ["long"] * ("long" not in asked)
    apart += ["full"] * (not asked & {"full", "long", "gpu"})
    left = [item for item in items if any(map(item.get_closest_marker, apart))]
    items[:] = [item for item in items if item not in left]
    config.hook.pytest_deselected(items=left)


def pytest_collection_finish() -> None:
    """Let torch have `THREADS` threads, where a test has imported it, and interpreted kernels a guard of their own."""
    if torch := sys.modules.get("torch"):
        from cpu import machine

        if not GPU:
            from device import startup
            from interpreted_guard import InterpretedGuard

            startup.CompileGuard = InterpretedGuard
        if THREADS == 1:
            settle = machine.settle
            machine.settle = lambda threads, *more: settle(threads or 1, *more)
        torch.set_num_threads(THREADS)
        if GPU and THREADS == 1:  # as many kernels compile at a time as there are cores
            share = machine.available_cores() // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
            machine.available_cores = lambda: max(1, share)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, Any]:
    """Skip the files that need more than is installed, where that may be so.

    A machine with a GPU may have no more than `LLM` needs. The default run does without requirements-full.txt.
    """
    report, pattern = (yield), r"ModuleNotFoundError: (No module named '(\w+).*)"
    found = re.search(pattern, str(report.longrepr)) if report.failed else None
    tier_lacks = found and found[2] in ORACLES and not re.search("full|long", collector.config.option.markexpr)
    if found and (tier_lacks or not find_spec("flask")):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: {found[1]}")
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what runs kernels where there is no Triton."""
    if item.get_closest_marker("interpreted") and not find_spec("triton"):
        pytest.skip("it runs kernels, and there is no Triton")


@pytest.fixture(scope="module", params=[pytest.param("cuda", marks=pytest.mark.gpu) if GPU else "cpu"])
def kernel_device(request: pytest.FixtureRequest) -> str:
    """The device for kernels: the GPU, or without one the CPU, where they are interpreted."""
    return request.param


@pytest.fixture
def device(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """`kernel_device`, with torch.empty poisoned: it gives NaN (integers: -7), which shows a place nobody wrote."""
    import numpy as np
    import torch

    torch.manual_seed(0)
    attention = importlib.import_module("ops.attention") if find_spec("triton") else None
    if attention:
        attention._programs.cache_clear()
        monkeypatch.setattr(attention, "PROCESSORS", 6)  # few programs for the interpreter, and rows in several of them
    empty, empty_like = torch.empty, torch.empty_like

    def poison(x: torch.Tensor) -> torch.Tensor:
        return x.fill_(float("nan") if x.is_floating_point() else -7)

    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: poison(empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: poison(empty_like(*args, **kwargs)))
    with np.errstate(all="ignore"):  # the interpreter computes in numpy, which warns of an overflow to inf
        yield kernel_device
    if attention:
        attention._programs.cache_clear()  # what comes later has as many programs as it would have alone


@pytest.fixture(params=["reference", "cpu.ops", "kernels"])
def ops(request: pytest.FixtureRequest) -> ModuleType:
    """A backend."""
    load = pytest.importorskip if request.param == "kernels" else importlib.import_module
    return load(request.param)


@pytest.fixture
def place(ops: ModuleType, device: str) -> str:
    """Where the backend's tensors lie."""
    return "cpu" if ops.__name__ == "cpu.ops" else device


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of a run share. What `random_checkpoints.once` makes there is made once a run."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def make_llm() -> Callable[..., LLM]:
    """Makes an `LLM` on the demo in float32, with other options where given."""
    return lambda **fields: LLM(DEMO, **({"dtype": "float32", "device": "cpu"} | fields))


@pytest.fixture(scope="session")
def llm(make_llm: Callable[..., LLM]) -> LLM:
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
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of the demo, in processes of its own, that all tests share which change nothing of it."""
    from served import serving  # here, because it brings the server's requirements

    with serving(tmp_path_factory.mktemp("server"), "--body-timeout", "2", "--threads", "1") as running:
        yield running


@pytest.fixture(scope="session")
def conversations() -> list[list[dict[str, str]]]:
    """Fifty conversations of all five tasks. The recalls among them have up to some 800 tokens."""
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
    for i, conversation in enumerate(conversations[:25]):  # which have all lengths
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
    """Makes a row's product the same wherever the row is in its tile, as it is on a GPU.

    Triton's interpreter multiplies by NumPy, and there the bits of a row's product can depend on the row's place. So
    here each row is multiplied by itself.
    """
    import numpy as np

    matmul = np.matmul

    def by_rows(a: Any, b: Any, **options: Any) -> Any:
        return matmul(a[..., None, :], b[..., None, :, :], **options)[..., 0, :]

    monkeypatch.setattr(np, "matmul", by_rows)


@pytest.fixture(scope="module")
def few_programs() -> Iterator[None]:
    """Lets attention_decode have 6 programs, because the interpreter runs them one after the other.

    The interpreter computes in NumPy, which would warn of what lies in memory that nobody has written yet.
    """
    import numpy as np

    kernels = pytest.importorskip("kernels")
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        if not GPU:
            patch.setattr(kernels, "_programs", lambda *_: 6)
        yield
