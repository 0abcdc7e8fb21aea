"""What an adapter's folder may hold, and the line that says so where it may not."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest

from lora.adapter import CONFIG, MOST_CHARS, MOST_KEYS, WEIGHTS, read_adapter
from lora.registry import state_of
from sampling_params import LoRARequest


def write(folder: Path, **fields: Any) -> str:
    """A folder whose config has these fields, and weights that nobody reads here."""
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16} | fields))
    (folder / WEIGHTS).touch()
    return str(folder)


def test_a_config_as_peft_writes_it(tmp_path: Path) -> None:
    """All fields of PEFT 0.21's LoraConfig at their defaults, and the rank's pattern."""
    shape_of, _ = read_adapter(
        write(
            tmp_path, alora_invocation_tokens=None, alpha_pattern={}, arrow_config=None, auto_mapping=None,
            base_model_name_or_path="some/base", bias="none", corda_config=None, ensure_weight_tying=False,
            eva_config=None, exclude_modules=None, fan_in_fan_out=False, inference_mode=True, init_lora_weights=True,
            kasa_config=None, layer_replication=None, layers_pattern=None, layers_to_transform=None, loftq_config={},
            lora_alpha=16, lora_bias=False, lora_dropout=0.05, lora_ga_config=None, megatron_config=None,
            megatron_core="megatron.core", modules_to_save=None, monteclora_config=None, peft_version="0.21.2", r=8,
            qalora_group_size=16, rank_pattern={"k_proj": 4}, revision=None, target_modules=["q_proj", "k_proj"],
            target_parameters=None, task_type="CAUSAL_LM", trainable_token_indices=None, use_bdlora=None,
            use_dora=False, use_qalora=False, use_rslora=False, velora_config=None,
        )
    )  # fmt: skip
    assert shape_of("model.layers.0.self_attn.k_proj") == shape_of("k_proj") == (4, 4)
    assert shape_of("model.layers.0.self_attn.q_proj") == (8, 2)


COUNT, NUMBER = "must be a whole number of at least 1", "must be a number"
PATTERNS: list[tuple[Any, str]] = [
    (["q_proj"], "an object of at most"),
    ({f"a{i}": 4 for i in range(MOST_KEYS + 1)}, f"an object of at most {MOST_KEYS} keys"),
    ({"(": 4}, "no regular expression: missing"),
    ({"[": 4}, "no regular expression: unterminated"),
    ({"a{99999999999}": 4}, "repetition number is too large"),
    ({"a" * (MOST_CHARS + 1): 4}, f"at most {MOST_CHARS} characters and 4 repeats, and no"),
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"peft_type": kind}, "must be 'LORA'") for kind in ("IA3", "PROMPT_TUNING", ["LORA"], None)),
    *(({"r": value}, COUNT) for value in (0, True, 8.0)),
    *(({"r": value}, "max_lora_rank is 16, and at most 256") for value in (17, 10**400)),
    ({"rank_pattern": {"q_proj": 32}}, "max_lora_rank is 16, and at most 256"),
    ({"rank_pattern": {"q_proj": None}}, COUNT),
    *(({"lora_alpha": value}, NUMBER) for value in (math.nan, False, 10**400)),
    ({"alpha_pattern": {"q_proj": "8"}}, NUMBER),
    *(({name: value}, words) for name in ("rank_pattern", "alpha_pattern") for value, words in PATTERNS),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_config_that_is_refused(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    folder = write(tmp_path, **fields)
    with pytest.raises(ValueError, match=f"{tmp_path}.*{[*fields][-1]} .*{words}") as refused:
        read_adapter(folder, 16)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 700


FORMULA = [
    "bias", "init_lora_weights", "use_qalora", "layer_replication", "use_bdlora", "kasa_config", "monteclora_config",
    "arrow_config", "alora_invocation_tokens", "megatron_config",
]  # fmt: skip


@pytest.mark.parametrize("name", FORMULA)
@pytest.mark.parametrize("value", [{"beta": 1}, "pissa_niter_16", True])
def test_a_field_that_changes_the_formula_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    refused = value is not True or name != "init_lora_weights"
    with pytest.raises(ValueError, match=f"{name} is .* must be") if refused else contextlib.nullcontext():
        read_adapter(write(tmp_path, **{name: value}))


@pytest.mark.parametrize("value", ["pissa", "olora", "pissa_niter_4", "corda"])
def test_an_adapter_of_changed_weights_is_told_how_to_convert_it(tmp_path: Path, value: str) -> None:
    with pytest.raises(
        ValueError, match=rf"is '{value}'; .*save_pretrained\(\.\.\., path_initial_model_for_weight_conv"
    ):
        read_adapter(write(tmp_path, init_lora_weights=value))


@pytest.mark.parametrize(
    ("name", "value"),
    [("use_dora", 1), ("lora_bias", "x"), ("target_parameters", "experts"), ("trainable_token_indices", 3)],
)
def test_a_field_of_another_type_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value!r}; it must be a .*, or left out"):
        read_adapter(write(tmp_path, **{name: value}))


def test_a_config_names_tokens_and_parameters(tmp_path: Path) -> None:
    """As PEFT finds them: by the end of a module's name, and stacks of experts by the nesting of their modules."""
    some = read_adapter(write(tmp_path, trainable_token_indices={"embed_tokens": [3], "lm_head": [4]}))
    assert [some.tokens_of(name) for name in ("model.embed_tokens", "lm_head", "my_lm_head")] == [[3], [4], None]
    assert read_adapter(write(tmp_path, trainable_token_indices=[5])).tokens_of("model.wte") == [5]
    experts, both = "model.layers.0.mlp.experts", ["gate.weight", "down_proj", "gate_up_proj"]
    some = read_adapter(write(tmp_path, target_parameters=both))
    assert some.parameter_of(experts) == f"{experts}.down_proj"
    assert some.parameter_of(f"{experts}.base_layer") == f"{experts}.gate_up_proj"
    assert some.parameter_of("model.layers.0.mlp.gate") == "model.layers.0.mlp.gate.weight"
    some = read_adapter(write(tmp_path, target_parameters=["mlp.experts.gate_up_proj"]))
    assert some.parameter_of(experts) == f"{experts}.gate_up_proj"
    assert read_adapter(write(tmp_path)).parameter_of(experts) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '"LORA"', "null", '{"r": 1' + "}" * 9, "[" * 100_000, "\xff\x00"])
def test_a_config_that_is_no_object(tmp_path: Path, text: str) -> None:
    folder = write(tmp_path)
    (tmp_path / CONFIG).write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=CONFIG) as refused:
        read_adapter(folder)
    assert "\n" not in str(refused.value)


def test_what_is_no_folder_of_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        read_adapter(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"its adapter_config\.json cannot be read: No such file"):
        state_of(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=CONFIG):
        read_adapter(str(tmp_path))
    folder = write(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(ValueError, match=f"has no {WEIGHTS}$"):
        read_adapter(folder)
    (tmp_path / "adapter_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(ValueError, match=r"but adapter_model\.bin, which may run any code when it is read"):
        read_adapter(folder)
    with pytest.raises(ValueError, match=rf"its {WEIGHTS} cannot be read: No such file"):
        state_of(folder)
    (tmp_path / WEIGHTS).symlink_to(tmp_path / WEIGHTS)  # is there, but leads nowhere
    with pytest.raises(ValueError, match="cannot be read"):
        state_of(folder)


@pytest.mark.parametrize("path", ["with\0a null", "x" * 5000, "/dev/null"])
def test_a_path_that_no_system_takes(path: str) -> None:
    with pytest.raises(ValueError, match=r"lora_path is|null|adapter_config") as refused:
        state_of(path)
    assert len(str(refused.value)) < 700


@pytest.mark.parametrize(
    ("patterns", "module", "found"),
    [  # what PEFT's get_pattern_key finds
        ({"q_proj": 4}, "model.layers.0.self_attn.q_proj", 4),
        ({"q_proj": 4}, "model.layers.0.self_attn.qq_proj", 8),
        ({"q.proj": 4}, "model.layers.0.self_attn.q_proj", 4),
        ({r"q\.proj": 4}, "model.layers.0.self_attn.q_proj", 8),
        ({"^q_proj": 4}, "model.layers.0.self_attn.q_proj", 8),
        ({"0.self_attn.q_proj": 4}, "model.layers.10.self_attn.q_proj", 8),
        ({"proj": 4}, "model.layers.0.self_attn.q_proj", 8),
        ({"self_attn.q_proj": 4, "q_proj": 2}, "model.layers.0.self_attn.q_proj", 4),
        ({"q_proj": 2, "self_attn.q_proj": 4}, "model.layers.0.self_attn.q_proj", 2),
        ({"layers.1.*": 4}, "model.layers.1.mlp.up_proj", 4),
        ({"layers.1.*": 4}, "model.layers.10.mlp.up_proj", 4),  # the dots match anything, there as here
        ({r"layers\.1\..*": 4}, "model.layers.10.mlp.up_proj", 8),
        ({"q_proj|k_proj": 4}, "model.layers.0.self_attn.k_proj", 4),
        ({"mlp.(?:up|down)_proj": 4}, "model.layers.0.mlp.down_proj", 4),
        ({"(up|down)?": 4}, "model.layers.0.mlp.down_proj", 8),
        ({r"^model\.layers\.[0-2]\..*": 4}, "model.layers.2.mlp.down_proj", 4),
        ({"": 4}, "q_proj", 8),
        ({r".*layers\.(\d|1\d)\..*(q|k|v)_proj": 4}, "model.layers.11.self_attn.k_proj", 4),
    ],
)
def test_a_pattern_matches_the_end_of_a_modules_name(
    tmp_path: Path, patterns: dict[str, int], module: str, found: int
) -> None:
    shape_of, _ = read_adapter(write(tmp_path, rank_pattern=patterns))
    assert shape_of(module)[0] == found


@pytest.mark.parametrize("text", ["(a|a)*b", "((a+)+)+b", ".*" * 5 + "b", "(a|a){9}b", r"[(](a|a)+", "a+b*.*.*c{2}"])
def test_a_pattern_that_may_take_exponentially_long_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"rank_pattern has the key .* 4 repeats, and no repeated group"):
        read_adapter(write(tmp_path, rank_pattern={text: 4}))


def test_the_slowest_repeats_that_are_taken(tmp_path: Path) -> None:
    shape_of, _ = read_adapter(write(tmp_path, rank_pattern={".*.*.*.*b": 4}))
    assert shape_of("model." + "a" * 44)[0] == 8
    assert shape_of("model." + "a" * 10 + "b")[0] == 4


def test_the_scale_is_of_the_modules_own_rank(tmp_path: Path) -> None:
    patterns = {"rank_pattern": {"k_proj": 4}, "alpha_pattern": {"v_proj": 2}}
    plain, _ = read_adapter(write(tmp_path, **patterns))
    assert [plain(name)[1] for name in ("q_proj", "k_proj", "v_proj")] == [2, 4, 0.25]
    rooted, _ = read_adapter(write(tmp_path, use_rslora=True, **patterns))
    assert [rooted(name)[1] for name in ("q_proj", "k_proj", "v_proj")] == [16 / 8**0.5, 8, 2 / 8**0.5]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("lora_name", value) for value in ("", None)),
        *(("lora_int_id", value) for value in (0, True, 1.0)),
        *(("lora_path", value) for value in ("", None)),
    ],
)
def test_a_request_for_an_adapter_that_is_none(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value!r}"):
        LoRARequest(**{"lora_name": "a", "lora_int_id": 1, "lora_path": "a"} | {name: value})


def test_a_folder_that_is_written_anew_has_another_adapter(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    before = state_of(folder)
    assert state_of(f"{folder}/../a") == before
    (tmp_path / "link").symlink_to(folder)
    assert state_of(str(tmp_path / "link")) == before
    Path(folder, WEIGHTS).write_bytes(b"new")
    assert (new := state_of(folder)) != before
    time.sleep(0.02)  # more than a tick of the file system's clock
    times = os.stat(Path(folder, WEIGHTS))
    (tmp_path / "copy").write_bytes(b"old")
    os.utime(tmp_path / "copy", ns=(times.st_atime_ns, times.st_mtime_ns))
    (tmp_path / "copy").replace(Path(folder, WEIGHTS))
    assert state_of(folder) != new
