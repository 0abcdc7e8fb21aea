"""The engine on a CUDA device: the CPU's tokens, the demo's skill, graphs, start-up, and a step of 256 sequences."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import reference
from config import DEMO, EngineConfig
from device import loader, startup
from device.loader import load_weights
from device.start import Start
from device.startup import start_worker
from engine import LLM, SamplingParams
from model import Transformer
from model_config import ModelConfig
from parallel import Group
from plan import NewRow, StepPlan

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GREEDY = SamplingParams(temperature=0, max_tokens=48)
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "eos_token_id": None,
}  # fmt: skip


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    """Each test has the GPU's memory for itself: engines take most of what is free, and some of them are in cycles."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


def answers(llm, conversations) -> list[str]:
    return [output.outputs[0].text for output in llm.chat(conversations, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected(llm, conversations) -> list[str]:
    """The CPU's answers."""
    return answers(llm, conversations)


@pytest.mark.parametrize("fields", [{}, {"num_gpu_blocks_override": 64, "block_size": 16}], ids=["", "few blocks"])
def test_cuda_gives_the_cpus_tokens_in_float32(make_llm, conversations, expected, fields):
    assert answers(make_llm(device="cuda", **fields), conversations) == expected


def test_prefixes_come_back_from_the_host(make_llm, conversations, expected):
    """What the device drops is copied to the host beside the steps, and copied back for those who ask again."""
    llm = make_llm(device="cuda", num_gpu_blocks_override=64, block_size=16, swap_space=0.2)
    for _ in range(3):
        assert answers(llm, conversations) == expected
    assert llm.core.metrics()["host_cache_hits_total"] > 1000


def test_demo_keeps_its_skill_in_bfloat16(conversations, expected):
    told = answers(LLM(device="cuda"), conversations)
    assert sum(a == b for a, b in zip(told, expected, strict=True)) >= 45


def test_graphs_give_the_tokens_of_eager_steps(make_llm, conversations, tmp_path):
    """The steps have 1 to 9 rows, and most of them are padded. The trace says which were replayed."""
    told, found, path = [], [], tmp_path / "trace"
    params = [replace(GREEDY, max_tokens=3 + 5 * i, ignore_eos=True) for i in range(9)]
    params[4] = replace(params[4], temperature=0.8, seed=1, repetition_penalty=1.2)
    params[5] = replace(params[5], logprobs=2)  # found after the replay
    for eager in (False, True):
        llm = make_llm(device="cuda", max_num_seqs=9, enforce_eager=eager, **{} if eager else {"trace": str(path)})
        graphs = llm.core.executor.worker.graphs
        assert not graphs if eager else {shape.rows for shape in graphs} == {1, 2, 4, 8, 9}
        outputs = llm.chat(conversations[:9], params, use_tqdm=False)
        told.append([output.outputs[0].token_ids for output in outputs])
        found.append([score.logprob for by_token in outputs[5].outputs[0].logprobs for score in by_token.values()])
        llm.core.close()
    assert told[0] == told[1] and found[0] == pytest.approx(found[1], abs=1e-3)
    events = [event for event in json.loads(path.read_text()) if event["ph"] == "X"]
    replayed = {event["args"]["step"] for event in events if event["name"] == "decode" and event["tid"] == 2}
    steps = {event["args"]["step"] for event in events if event["name"] == "update"}
    assert len(replayed) > 30 and len(steps) - len(replayed) <= 3  # steps with prompts are not replayed
    device = [event for event in events if event["tid"] == 2]
    for event, following in pairwise(device):
        assert event["dur"] >= 0 and event["ts"] + event["dur"] <= following["ts"] + 1


def test_together_and_one_by_one_on_cuda(make_llm):
    llm = make_llm(device="cuda", batch_invariant=True)
    params = [SamplingParams(temperature=0.9, top_p=0.95, seed=i, max_tokens=20, ignore_eos=True) for i in range(24)]
    prompts = [[5 + (i * j) % 1000 for j in range(1, 2 + 13 * i)] for i in range(24)]
    together = llm.generate(prompts, params, use_tqdm=False)
    for prompt, param, output in zip(prompts, params, together, strict=True):
        alone = llm.generate(prompt, param, use_tqdm=False)[0]
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids


def test_cuda_gives_the_cpus_logprobs():
    found = []
    for device in ("cpu", "cuda"):
        config = EngineConfig(dtype="float32", device=device, num_gpu_blocks_override=64, swap_space=0.1)
        worker = start_worker(config, ModelConfig.from_folder(DEMO))
        new = [NewRow(slot=i, token_ids=[5 + i, 80, 300], blocks=[[i]], num_logprobs=k)
               for i, k in enumerate((0, -1, 7, 2))]  # fmt: skip
        found.append(worker.step(StepPlan(0, rows=[(i, 3) for i in range(4)], new=new)))
    (cpu, cuda), facts = found, worker.facts()
    assert cpu.token_ids == cuda.token_ids and list(cpu.logprobs) == list(cuda.logprobs) == [0, 2, 3]
    for i, ours in cuda.logprobs.items():
        assert ours.ids == cpu.logprobs[i].ids and (not ours.ids or ours.values[0] == ours.sampled)  # greedy
        theirs = cpu.logprobs[i]
        assert [ours.sampled, *ours.values] == pytest.approx([theirs.sampled, *theirs.values], abs=1e-3)
    assert worker.host_pool.is_pinned() and facts["num_host_blocks"] > 0 and facts["swap_cost"] > 0


def write_weights(folder: Path) -> None:
    """Write made-up weights for the config.json there. Those of `load_format="dummy"` are others on each device."""
    model = Transformer(ModelConfig.from_folder(str(folder)), reference, "meta", torch.float32, 8, Group())
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, part in model.parameters().items():
        if not part.instead_of:
            tensors[name] = torch.randn(part.shape, generator=generator) * part.shape[-1] ** -0.5
            tensors[name] += len(part.shape) == 1 and name.endswith("weight")  # a norm's
    save_file(tensors, folder / "model.safetensors")


def test_recurrent_states_on_cuda_give_the_cpus_tokens_in_float32(tmp_path):
    """Decodes are replayed and padded; prompts come in chunks, and again from their snapshots."""
    shape = {"architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 4, "hidden_size": 256, "vocab_size": 5000}
    shape |= {"intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    shape |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B | shape | {"linear_value_head_dim": 64}))
    write_weights(tmp_path)
    prompts, found = [[3 + i * j % 4000 for j in range(20 + 30 * i)] for i in range(9)], []
    options = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 9, "block_size": 16}
    options |= {"max_num_batched_tokens": 200, "num_state_snapshots": 64}
    for device in ("cpu", "cuda"):
        llm = LLM(str(tmp_path), device=device, skip_tokenizer_init=True, **options)
        for _ in range(2):
            outputs = llm.generate(prompts, replace(GREEDY, ignore_eos=True), use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
        assert llm.core.metrics()["prefix_cache_hits_total"] > 1000
    assert found[0] == found[1] == found[2] == found[3]


def test_256_sequences_of_a_real_shape(tmp_path, llm):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(f"{llm.config.model}/{name}")
    # A failed test keeps its engine, which must leave room for those after it.
    options = {"load_format": "dummy", "max_model_len": 4096, "gpu_memory_utilization": 0.5}
    big = LLM(str(tmp_path), device="cuda", **options)
    planned = big.core.facts["memory"]
    assert 0.5 * planned["activations"] < planned["measured"] <= 1.05 * planned["predicted"]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    outputs = big.generate([[i + 1] * 100 for i in range(256)], params)
    assert all(len(output.outputs[0].token_ids) == 64 for output in outputs)
    assert big.core.metrics()["num_requests_running"] == 0


def test_a_rehearsal_leaves_warm_up_nothing_to_compile(make_llm, monkeypatch):
    rehearse = startup.rehearse

    def rehearse_and_arm(made: Start) -> None:
        for kernel in made.guard.kernels.values():
            kernel.device_caches.clear()  # what the tests before have compiled
        rehearse(made)
        made.guard.armed = True

    monkeypatch.setattr(startup, "rehearse", rehearse_and_arm)
    for fields in ({}, {"batch_invariant": True}, {"dtype": "float32", "block_size": 16}):
        assert make_llm(device="cuda", **fields).core.facts["startup"]["kernels"] > 0


@pytest.mark.parametrize("buffer_bytes", [2**12, loader.BUFFER_BYTES])
def test_weights_that_went_through_pinned_buffers_are_the_files(monkeypatch, buffer_bytes):
    monkeypatch.setattr(loader, "BUFFER_BYTES", buffer_bytes)
    config, models = ModelConfig.from_folder(DEMO), []
    for device in ("cpu", "cuda"):
        models.append(Transformer(config, reference, device, torch.float16, 8, Group()))
        load_weights(models[-1], DEMO)
    cpu, cuda = (model.parameters() for model in models)
    assert all(torch.equal(part.pieces[0].target, cuda[name].pieces[0].target.cpu()) for name, part in cpu.items())


def interprets() -> bool:
    """Whether Triton's interpreter works: before 3.7 a loop's bound is no integer to NumPy from 2.4 on."""
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    return triton >= (3, 7) or numpy < (2, 4)


@pytest.mark.skipif(not interprets(), reason="Triton's interpreter fails beside this NumPy")
def test_interpreted_kernels_in_a_process_without_the_gpu():
    """The tests that are marked `interpreted`, because in this process kernels are compiled."""
    marked = "interpreted and (full or not full)"
    command = [sys.executable, "-m", "pytest", "-m", marked, "-p", "no:cacheprovider", "tests"]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=Path(__file__).parents[1], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
