"""The benchmarks run and count right; how fast anything is, is not for tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import (
    SHAPES,
    Peer,
    agreement,
    latency_figures,
    make_model,
    prefix_figures,
    scheduler_figures,
    throughput_figures,
    throughput_work,
)
from config import DEMO, SamplingParams
from engine import LLM

ROOT = Path(__file__).parent.parent
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 500}  # fmt: skip
FAKE = """
import json, sys
print(json.dumps({"engine": "fake 1.0 " + " ".join(sys.argv[1:])}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    if job["new_tokens"] == 13:
        sys.exit(3)
    tokens = [[0] * job["new_tokens"] for _ in job["prompts"]]
    print(json.dumps({"prefill": 0.5, "decode": 2.0, "tokens": tokens}), flush=True)
"""


@pytest.fixture
def fake(tmp_path):
    program = tmp_path / "fake.py"
    program.write_text(FAKE)
    peer = Peer("fake", sys.executable, ["folder", "--threads", "1"], program)
    yield peer
    peer.close()


def test_scheduler_figures():
    figures = scheduler_figures(repeats=3)
    assert [(f["running"], f["waiting"]) for f in figures] == [(256, 0), (256, 10_000), (256, 0), (32, 0)]
    assert all(f["both us/seq"] > 0 for f in figures)


def test_prefix_figures(tmp_path):
    trace = tmp_path / "trace.jsonl"
    requests = [[0, 1, 2], [4, 5, 6], [0, 1, 7], [0, 1, 2, 5]]  # an infinite cache finds 2 + 3 pages
    trace.write_text("".join(json.dumps({"hash_ids": pages}) + "\n" for pages in requests))
    small, tiered, large = prefix_figures(trace, [3], 4)
    assert large["hit rate"] == round(5 / 13, 4) and large["of an infinite cache"] == 1.0
    assert small["prompts refused"] == tiered["prompts refused"] == 1
    assert small["hit rate"] == 0 and tiered["hit rate"] == round(2 / 13, 4)
    assert small["pages moved"] == 0 < tiered["pages moved"]


def test_the_command_line_writes_json(tmp_path):
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    trace.write_text('{"hash_ids": [0, 1]}\n{"hash_ids": [0, 1, 2]}\n')
    command = [sys.executable, "bench.py", "--json", out, "prefix", "--trace", trace, "--pools", "2"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "hit rate" in run.stdout
    written = json.loads(out.read_text())
    assert len(written["figures"]) == 3 and {"date", "cpu", "command"} <= set(written["machine"])


def test_throughput_is_nano_vllms_workload():
    assert sum(output for _, output in throughput_work(256, 1.0, 151936)) == 133966  # as its README counts
    work = throughput_work(3, 0.01, 1000)
    (figure,) = throughput_figures(DEMO, 3, 0.01, {"load_format": "dummy", "max_num_seqs": 8})
    assert figure["requests"] == 3 and figure["output tokens"] == sum(output for _, output in work)
    assert 0 < figure["output tok/s"] < figure["total tok/s"]


def test_latency_counts_tokens_and_bytes(fake):
    assert fake.name == "fake 1.0 fake folder --threads 1"
    figures = latency_figures(DEMO, [(1, 8), (3, 20)], 5, 2, [fake], {"dtype": "float32", "device": "cpu"})
    assert [(f["batch"], f["prompt"]) for f in figures] == [(1, 8), (1, 8), (3, 20), (3, 20)]
    manta, peer = figures[2:]
    assert manta["min"] <= manta["decode tok/s"] <= manta["max"] and manta["first 4 as Manta"] == 1
    assert peer["engine"] == fake.name and peer["ms/token"] == 500 and peer["first 4 as Manta"] < 0.5
    assert peer["decode tok/s"] == peer["min"] == peer["max"] == 3 * 4 / 2  # the first token is prefill's
    assert peer["prefill tok/s"] == 3 * 20 / 0.5


def test_agreement_is_of_the_first_tokens():
    answers = [{"tokens": [[1, 2, 3, 4, 5], [1, 2, 9, 9, 9]]}]
    assert agreement(answers, [{"tokens": [[1, 2, 3, 4, 9], [1, 2, 3, 4, 5]]}]) == 6 / 8


def test_a_peer_that_ends_is_named(fake):
    with pytest.raises(RuntimeError, match="fake ended with status 3"):
        fake([[1]], 13)
    with pytest.raises(RuntimeError, match="fake ended with status 3"):
        fake([[1]], 2)


def test_transformers_is_a_peer(tmp_path):
    folder = str(tmp_path / "model")
    make_model(Path(folder), SHAPES["qwen3-0.6b"] | TINY | {"dtype": "float32"})
    peer = Peer("transformers", sys.executable, [folder, "--threads", "1"])
    try:
        manta, other = latency_figures(folder, [(2, 16)], 6, 1, [peer], {"device": "cpu"})
    finally:
        peer.close()
    assert other["engine"].startswith("transformers ") and other["decode tok/s"] > 0
    assert manta["first 4 as Manta"] == other["first 4 as Manta"] == 1


def test_make_model_makes_what_loads(tmp_path):
    make_model(tmp_path / "model", SHAPES["qwen3-0.6b"] | TINY)
    llm = LLM(str(tmp_path / "model"), max_model_len=64)
    (out,) = llm.generate([[1, 2, 499]], SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)
    assert len(out.outputs[0].token_ids) == 4 and out.outputs[0].text.startswith(" w")
