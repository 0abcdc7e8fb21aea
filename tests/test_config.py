"""What is read from a model's folder: which architectures are refused, and the defaults of its requests."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from config import DEMO, EngineConfig
from device.startup import start_worker
from engine import LLM, SamplingParams
from model_config import ModelConfig
from sampling_params import default_sampling

ROOT = Path(__file__).parent.parent


def test_a_config_without_an_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"^config.json names no architecture; docs/families\.md has"):
        ModelConfig.from_folder(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "near"),
    [("Qwen3OmniForCausalLM", "Qwen3"), ("Gemma3mForCausalLM", "Gemma3"), ("LlamaModelForCausalLM", "Llama")],
)
def test_the_nearest_families_are_named_first(tmp_path: Path, name: str, near: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    with pytest.raises(ValueError, match=rf"^config.json is of a '{name}'; nearest to it are {near}[,;]"):
        ModelConfig.from_folder(str(tmp_path))


@pytest.mark.parametrize(
    ("field", "value"), [("moonshine_gain", 1.5), ("attention_bias", True), ("extra_layers", [1]), ("mlp_bias", True)]
)
def test_a_field_that_nobody_reads_is_an_error(tmp_path: Path, field: str, value: Any) -> None:
    raw = json.loads(Path(DEMO, "config.json").read_text()) | {"architectures": ["MistralForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(raw | {field: value}))
    with pytest.raises(ValueError, match=rf"^config.json: '{field}' is .*, and Manta does not know that field"):
        ModelConfig.from_folder(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(raw | {field: None}))
    assert ModelConfig.from_folder(str(tmp_path))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The demo with sampling values of its own."""
    shutil.copytree(DEMO, tmp_path / "model", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    says = {"eos_token_id": [1, 0], "do_sample": True, "temperature": 0.5, "top_k": 20, "top_p": 0.8, "min_p": None,
            "repetition_penalty": 1.1, "max_new_tokens": 9}  # fmt: skip
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(says))
    return tmp_path / "model"


def test_generation_config_is_what_llm_takes_without_parameters(folder: Path) -> None:
    defaults = {"temperature": 0.5, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1, "max_tokens": 9}
    assert default_sampling(EngineConfig(str(folder))) == defaults
    llm = LLM(str(folder), device="cpu", dtype="float32", seed=3)
    assert llm.get_default_sampling_params() == SamplingParams(**defaults)
    tokens = llm.generate("Enter", use_tqdm=False)[0].outputs[0].token_ids
    assert 0 < len(tokens) <= 9
    longer = SamplingParams(max_tokens=12, ignore_eos=True)
    assert len(llm.generate("Enter", longer, use_tqdm=False)[0].outputs[0].token_ids) == 12
    ignoring = LLM(str(folder), device="cpu", dtype="float32", generation_config="none")
    assert ignoring.get_default_sampling_params() == SamplingParams()


def test_the_demo_is_asked_at_a_low_temperature(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.3)


@pytest.mark.parametrize("value", [-1, "hot"])
def test_a_generation_config_out_of_range_is_refused_by_its_name(folder: Path, value: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"temperature": value}))
    with pytest.raises(ValueError, match=r"^temperature is .*generation_config.json says so, and --gen"):
        LLM(str(folder), device="cpu")


def test_listed_tokens_count_once():
    params = SamplingParams(allowed_token_ids=[701, 700] * 500_000, stop_token_ids=[9, 8, 9, 9])
    assert params.allowed_token_ids == (701, 700) and params.stop_token_ids == (9, 8)
    assert params.num_listed == 4 and SamplingParams().num_listed == 0


@pytest.mark.parametrize("name", ["allowed_token_ids", "stop_token_ids"])
def test_listed_tokens_are_of_the_vocabulary(llm, name):
    size = llm.core.facts["vocab_size"]
    every = SamplingParams(**{name: range(size) if name == "stop_token_ids" else [*range(size)]}, max_tokens=3, n=2)
    assert llm.generate([5, 6], every, use_tqdm=False)[0].outputs[1].finish_reason in ("stop", "length")
    beyond = SamplingParams(**{name: [5, *range(size, 100_000)]})
    with pytest.raises(ValueError, match=rf"^{name} has token ids \[{size}, .{{1,60}}\]; allowed: 0 to {size - 1}$"):
        llm.generate([5, 6], beyond, use_tqdm=False)


BAD: list[Any] = [
    None, True, False, 0, -1, -3, 1, 2, 3, 7, 0.5, 1e-320, 1e30, 10**9, 10**400, math.inf, -math.inf, math.nan, "", "7",
    "a\nb", "\ud800", [], [1], [None], [[]], ["a\nb"], [math.nan], {}, {"a": 1}, {"rope_type": "yarn"},
]  # fmt: skip
ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512, "beta_fast": 32, "beta_slow": 1,
     "attention_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "truncate": True},
    {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "factor": 2.0,
     "original_max_position_embeddings": 512},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 512},
]  # fmt: skip
SMALL = json.loads(Path(DEMO, "config.json").read_text()) | {"num_hidden_layers": 2}
FIELDS = ["layer_types", "sliding_window", "max_window_layers", "mlp_bias", "use_bias", "dtype",
          "rope_parameters", "quantization_config", *SMALL]  # fmt: skip


def check_start(folder: Path, started: set[str]) -> None:
    """A worker with made-up weights starts on the folder's config.json, or one line says why not."""
    config = EngineConfig(
        str(folder), device="cpu", dtype="float32", threads=1, load_format="dummy", max_num_seqs=2,
        max_num_batched_tokens=64, num_gpu_blocks_override=2, max_model_len=32,
    )  # fmt: skip
    try:
        model_config = ModelConfig.from_folder(str(folder))
        if repr(model_config) not in started:  # many values leave the model as it is
            started.add(repr(model_config))
            assert all(table.isfinite().all() for table in start_worker(config, model_config).model.rotations)
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 400


@pytest.mark.parametrize("field", FIELDS)
def test_a_bad_value_is_one_line_or_a_model_that_starts(tmp_path: Path, field: str) -> None:
    started: set[str] = set()
    for value in BAD:
        (tmp_path / "config.json").write_text(json.dumps(SMALL | {field: value}))
        check_start(tmp_path, started)


@pytest.mark.parametrize(
    "rope",
    [
        pytest.param(rope, id=kind, marks=[pytest.mark.full] * (kind in ("yarn", "dynamic", "llama3")))
        for rope in ROPES
        if (kind := rope["rope_type"])
    ],
)
def test_a_bad_value_of_rope_is_one_line_or_a_model_that_starts(tmp_path: Path, rope: dict[str, Any]) -> None:
    raw, started = SMALL | {"num_hidden_layers": 1}, set()
    for field in [*rope, "rope_theta"]:
        for value in BAD:
            (tmp_path / "config.json").write_text(json.dumps(raw | {"rope_scaling": rope | {field: value}}))
            check_start(tmp_path, started)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be a whole number from 1 to 1024"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps is inf; it must be a number from 1e-20 to 1"),
        ({"rope_theta": math.nan}, "rope_theta is nan; it must be a number from 2 to "),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, r"factor is 0; it must be a number from 0\.001 to "),
        ({"head_dim": 33}, "head_dim is 33; it must be even"),
        ({"head_dim": None, "num_attention_heads": 10}, "hidden_size is 192; .* a multiple of 10 heads"),
        ({"torch_dtype": "int8"}, "dtype 'int8'; it must be bfloat16, float16, float32"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be true or false"),
        ({"eos_token_id": [1, True]}, "eos_token_id has True; allowed: token ids from 0 to 1023"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_a_bad_value_is_named_with_what_is_allowed(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    raw = json.loads(Path(DEMO, "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(ValueError, match=named):
        ModelConfig.from_folder(str(tmp_path))


def test_an_empty_generation_config_says_nothing(folder: Path) -> None:
    (folder / "generation_config.json").write_text("")
    assert default_sampling(EngineConfig(str(folder))) == {}


@pytest.mark.parametrize(("written", "dtype"), [("torch.bfloat16", "bfloat16"), ("auto", "float32")])
def test_a_dtype_as_transformers_prints_it(tmp_path: Path, written: str, dtype: str) -> None:
    raw = json.loads(Path(DEMO, "config.json").read_text()) | {"torch_dtype": written}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert ModelConfig.from_folder(str(tmp_path)).dtype == dtype


def test_a_generation_config_that_is_no_object_is_named(folder: Path) -> None:
    (folder / "generation_config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"generation_config\.json holds a list; it must hold a JSON object$"):
        ModelConfig.from_folder(str(folder))
