"""The benchmarks run and count right; how fast anything is, is not for tests."""

from __future__ import annotations

import inspect
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import bench
from bench_embed import embed_figures, make_embedder, short_texts
from bench_engine import (
    Peer,
    agreement,
    breakdown_figures,
    latency_figures,
    phases_of,
    throughput_figures,
    throughput_work,
)
from bench_prefix import prefix_figures, routing_figures
from config import DEMO, VERSION
from engine import LLM
from made_models import SHAPES, make_model
from sampling_params import SamplingParams

ROOT = Path(__file__).parent.parent.parent
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 500}  # fmt: skip
REQUIRED = {  # by command: options without defaults
    **dict.fromkeys(("policies", "prefix", "routing"), ("--trace", "x")), "lora": ("--model", "x"),
    "schemas": ("--file", "x"), "make-model": ("x",),
}  # fmt: skip
FAKE = """
import json, sys
print(json.dumps({"engine": "fake 1.0 " + " ".join(sys.argv[1:])}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    if job["new_tokens"] == 13:
        sys.exit(3)
    counts = job["new_tokens"] if isinstance(job["new_tokens"], list) else [job["new_tokens"]] * len(job["prompts"])
    tokens = [[0] * min(count, 50) for count in counts]
    print(json.dumps({"prefill": 0.5, "decode": 2.0, "seconds": 4.0, "tokens": tokens}), flush=True)
"""


@pytest.fixture
def fake(tmp_path):
    program = tmp_path / "fake.py"
    program.write_text(FAKE)
    peer = Peer("fake", sys.executable, ["folder", "--threads", "1"], program)
    yield peer
    peer.close()


def test_prefix_figures(tmp_path):
    trace = tmp_path / "trace.jsonl"
    requests = [[0, 1, 2], [4, 5, 6], [0, 1, 7], [0, 1, 2, 5]]  # an infinite cache finds 2 + 3 pages
    trace.write_text("".join(json.dumps({"hash_ids": pages}) + "\n" for pages in requests))
    small, tiered, large = prefix_figures(trace, [3], 4)
    assert large["hit rate"] == round(5 / 13, 4) and large["of an infinite cache"] == 1.0
    assert small["prompts refused"] == tiered["prompts refused"] == 1
    assert small["hit rate"] == 0 and tiered["hit rate"] == round(2 / 13, 4)
    assert small["pages moved"] == 0 < tiered["pages moved"]
    (routed,) = routing_figures(trace, 2, [20])
    assert routed["by prefix"] == round(5 / 13, 4) and routed["round robin"] < routed["by prefix"]


def test_the_command_line_writes_json(tmp_path):
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    trace.write_text('{"hash_ids": [0, 1]}\n{"hash_ids": [0, 1, 2]}\n')
    command = [sys.executable, "bench/bench.py", "--json", out, "prefix", "--trace", trace, "--pools", "2"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "hit rate" in run.stdout
    written = json.loads(out.read_text())
    assert len(written["figures"]) == 3 and {"date", "cpu"} <= set(written["machine"])
    assert written["machine"]["command"] == "python bench/bench.py --json out.json prefix --trace trace.jsonl --pools 2"


def test_without_numpy_it_says_so_in_a_line():
    command = [sys.executable, "-S", "bench/bench.py", "--help"]  # -S: without the packages that pip has installed
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1 and run.stderr.startswith(f"{sys.executable} has no numpy: ")
    assert run.stderr.count("\n") == 1


def test_throughput_is_nano_vllms_workload():
    assert sum(output for _, output in throughput_work(256, 1.0, 151936)) == 133966  # as its README counts
    work = throughput_work(3, 0.01, 1000)
    (figure,) = throughput_figures(DEMO, work, {"load_format": "dummy", "max_num_seqs": 8})
    assert figure["requests"] == 3 and figure["output tokens"] == sum(output for _, output in work)
    assert 0 < figure["output tok/s"] < figure["total tok/s"]


def test_throughput_takes_turns_with_peers(fake):
    work = [([1, 2, 3], 5), ([4], 2)]
    manta, peer = throughput_figures(DEMO, work, {"device": "cpu"}, 2, [fake])
    assert [(f["engine"], f["prompt tokens"], f["output tokens"]) for f in (manta, peer)] == [
        (f"Manta {VERSION}", 4, 7), (fake.name, 4, 7),
    ]  # fmt: skip
    assert (peer["seconds"], peer["output tok/s"], peer["total tok/s"]) == (4.0, 1.8, 2.8)
    assert manta["of Manta"] == 1 and 0 < peer["of Manta"] < 1
    with pytest.raises(RuntimeError, match=r"fake 1.0 .* wrote \[50\] tokens, not \[51\]"):
        throughput_figures(DEMO, [([1], 51)], {"device": "cpu"}, 1, [fake])


@pytest.mark.parametrize(("command", "other"), [("throughput", "llama.cpp"), ("latency", "vllm")])
def test_each_benchmark_has_its_own_peers(command, other, capsys, monkeypatch):
    for words, message in (
        (["--peer", other, "--peer-python", "python"], other),
        (["--peer-python", "python"], "--peer is given 0 times; --peer-python 1 times"),
    ):
        monkeypatch.setattr(sys, "argv", ["bench.py", command, *words])
        with pytest.raises(SystemExit):
            bench.main()
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", bench.COMMANDS)
def test_each_command_has_the_options_that_its_function_takes(name):
    parameters = inspect.signature(pkgutil.resolve_name(bench.COMMANDS[name][0])).parameters
    options = vars(bench.new_parser().parse_args([name, *REQUIRED.get(name, ())])).keys() - {"command", "json"}
    if "peer_python" in options:
        options = options - {"peer", "peer_python"} | {"peers"}
    if "options" not in parameters or parameters["options"].kind is not inspect.Parameter.VAR_KEYWORD:
        assert options <= parameters.keys()
    assert {p.name for p in parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD} <= options


@pytest.mark.full
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


@pytest.mark.long
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


@pytest.mark.parametrize("shape", ["qwen3-0.6b", pytest.param("qwen3-moe-4b", marks=pytest.mark.full)])
def test_make_model_makes_what_loads(tmp_path, shape):
    make_model(tmp_path / "model", SHAPES[shape] | TINY)
    llm = LLM(str(tmp_path / "model"), max_model_len=64)
    (out,) = llm.generate([[1, 2, 499]], SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)
    assert len(out.outputs[0].token_ids) == 4 and out.outputs[0].text.startswith(" w")


def test_embeddings_take_turns_with_a_peer(tmp_path):
    make_model(tmp_path, SHAPES["qwen3-0.6b"] | TINY | {"dtype": "float32"})
    make_embedder(tmp_path, TINY["hidden_size"], "lasttoken")
    texts = short_texts(5, TINY["vocab_size"], (10, 40))
    first, *_ = LLM(str(tmp_path), device="cpu").embed(texts, use_tqdm=False)
    assert [f"w{id}" for id in first.prompt_token_ids] == texts[0].split()
    assert all(10 <= len(text.split()) <= 40 for text in texts)

    class Fake:
        name = "fake"

        def __call__(self, given, _):
            assert given == texts
            return {"seconds": 1e9, "cpu": 1e-9, "tokens": [[1.0] + [0.0] * 63] * 5}

    manta, peer = embed_figures(str(tmp_path), texts, 3, {"device": "cpu"}, [Fake()])
    assert (manta["of Manta"], manta["of Manta by CPU"], manta["largest difference"]) == (1, 1, 0)
    assert manta["least cosine"] == pytest.approx(1, abs=1e-5) and peer["engine"] == "fake"
    assert peer["of Manta"] == 0 and peer["of Manta by CPU"] > 1 and peer["largest difference"] > 0.1
    assert peer["texts/s"] == peer["min"] == peer["max"] == 0 < manta["min"] <= manta["texts/s"] <= manta["max"]


def test_phases_of_a_step_add_up():
    """Of two steps of 2 sequences and one of 3, in microseconds; the last has no end."""

    def step(begin: float, rows: int, model: float) -> list[dict]:
        spans = [("schedule", 0, 0, 5), ("submit", 0, 5, 1), ("wait", 0, 9, model + 20), ("apply", 1, 10, 5)]
        spans += [("move_blocks", 1, 14, 2), ("apply", 1, 16, 2)]
        spans += [("model", 1, 17, model), ("sample", 1, 17 + model, 3), ("results", 1, 20 + model, 4)]
        spans += [("model", 2, 17, 999), ("update", 0, 29 + model, 6)]
        return [
            {
                "name": name,
                "tid": lane,
                "ts": begin + at,
                "dur": taken,
                "args": {"rows": rows, "tokens": rows} if at == 5 else {},
            }
            for name, lane, at, taken in spans
        ]

    events = step(0, 2, 100) + step(150, 3, 10) + step(200, 2, 200) + step(450, 2, 1)
    figures = phases_of(events, 2, cuda=False)
    assert figures["steps"] == 2 and figures["schedule"] == 5 and figures["apply"] == 7 and figures["results"] == 4
    assert figures["model"] == 153 and figures["step"] == 200  # the medians of 103 and 203, and of 150 and 250
    assert figures["block copies"] == 2
    assert figures["the engine's own"] == 5 + 1 + 6 + 20 - 3 - 2 and figures["streams and text"] == 200 - 170 - 12
    assert phases_of(events, 2, cuda=True)["the engine's own"] == 12
    assert phases_of(events, 2, cuda=True)["model"] == 999
    with pytest.raises(ValueError, match="no step has decoded 4 sequences"):
        phases_of(events, 4, cuda=False)


def test_breakdown_of_the_demo():
    figures, others, one, _ = breakdown_figures(DEMO, [3, 1], 5, {"device": "cpu"})
    assert (figures["prompt"], others["prompt"]) == ("16", "16 to 18")
    assert figures["sequences"] == 3 and figures["steps"] == 7  # the very last one has no end
    assert one["sequences"] == 1 and one["steps"] == 7
    for part in ("the engine's own", "model"):  # whose medians may add up to more than the median of their steps
        assert 0 < figures[part] < figures["step"]
