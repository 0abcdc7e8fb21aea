"""The tables of several models: what they say, and what is wrong with them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest

from api.options import ServerConfig, with_all_keys
from commands.models import SeveralModels, tables_of
from config import DEMO, EngineConfig

ADAPTER = os.path.join(DEMO, "adapters", "products")


def several(path: Path, text: str, engine: dict[str, Any] | None = None, **options: Any) -> SeveralModels:
    (file := path / "models.toml").write_text(text)
    config = with_all_keys(ServerConfig(models=str(file), **options), {})
    return SeveralModels(argparse.Namespace(in_file=(), config=None), EngineConfig(**(engine or {})), config)


def test_a_table_says_what_a_model_is(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    text = f"""
    [small]
    path = "{DEMO}"
    pin = true
    max-num-seqs = 4
    tool_call_parser = "hermes"
    ["org/large"]
    path = "org/large"
    ttl = 60
    memory = 1.5
    [beside]
    path = "here"
    """
    small, large, beside = several(tmp_path, text, {"device": "cpu", "max_num_seqs": 8}).entries
    assert (small.name, small.config.model, small.pin, small.ttl) == ("small", DEMO, True, float("inf"))
    assert (small.config.max_num_seqs, small.config.device) == (4, "cpu")
    assert small.served == {"tool_call_parser": "hermes"} and small.config.scheduling_policy == "fcfs"
    assert (large.name, large.config.model, large.pin, large.ttl, large.memory) == ("org/large",) * 2 + (False, 60, 1.5)
    assert large.config.max_num_seqs == 8 and beside.config.model == str(tmp_path / "here")


def test_the_example_of_the_docs_is_a_table(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "models_on_demand.md").read_text()
    text = page.partition("```toml\n")[2].partition("```")[0]
    models = several(tmp_path, text.replace("/adapters/sql", ADAPTER), {"max_lora_rank": 64})
    assert [entry.name for entry in models.entries] == ["small", "org/coder"]
    assert models.adapters["org/coder"].find("sql") and not models.adapters["small"].find("sql")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = 3", "a is 3; it must be a table"), ("[a", "is no TOML"), ("", "there are 0 models"),
        ("[a]", "[a] path is None; it must be a folder"), ("[a]\npath = 3", "[a] path is 3"),
        ('[a]\npath = "demo"\nmax_num_seq = 3', "[a] has no key 'max_num_seq'; the nearest is max_num_seqs"),
        ('[a]\npath = "demo"\nmax_num_seqs = 0', "[a] max_num_seqs is 0; it must be at least 1"),
        ('[a]\npath = "demo"\npin = 1', "[a] pin is 1; it must be true or false"),
        ('[a]\npath = "demo"\npin = true\nttl = 3', "[a] ttl is 3; with pin it must be left out"),
        ('[a]\npath = "demo"\nttl = 0', "[a] ttl is 0; it must be a number above 0"),
        ('[a]\npath = "demo"\nmemory = "1"', "[a] memory is '1'; it must be a number above 0"),
        ('[a]\npath = "demo"\nmodel = "demo"', "[a] has no key 'model'"),
        ('[a]\npath = "demo"\ndata_parallel_size = 2', "[a] data_parallel_size is 2; with several models"),
        ('[a]\npath = "demo"\nheadless = true', "[a] "),
        ('[a]\npath = "demo"\ndistributed_executor_backend = "torchrun"', "[a] distributed_executor_backend is "),
        ('[a]\npath = "demo"\ntool_call_parser = "x"', "[a] tool_call_parser is 'x'"),
        ('["a b"]\npath = "demo"', "without spaces"),
        ('[a]\npath = "demo"\nmax-num-seqs = 2\nmax_num_seqs = 3', "[a] has max-num-seqs and max_num_seqs, which"),
        ('[a]\npath = "demo"\nlora_modules = ["x=/a"]', "[a] lora_modules is given; it needs --enable-lora"),
        ('[a]\npath = "demo"\nlora_modules = ["b=/a"]\n[b]\npath = "demo"', "[a] lora_modules has 'b', which is a"),
        (
            f'[a]\npath = "demo"\nlora_modules = ["x={ADAPTER}"]\nenable_lora = true\n'
            f'[b]\npath = "demo"\nlora_modules = ["x={ADAPTER}"]',
            "[b] lora_modules has 'x', which is a name of the model, or taken",
        ),
        ('[a]\npath = "demo"\ndevice = "cpu"\n[b]\npath = "demo"', "device is 'cpu' for some models"),
    ],
)  # fmt: skip
def test_a_wrong_table_is_named_with_its_key(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        several(tmp_path, text)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_options_of_one_model_stand_in_its_table(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text('[a]\npath = "demo"')
    config = ServerConfig(models=str(tmp_path / "models.toml"))
    flags = argparse.Namespace(in_file=(), config=None, model="demo")
    with pytest.raises(ValueError, match="--model is given; with several models"):
        SeveralModels(flags, EngineConfig(), config)
    with pytest.raises(ValueError, match="data_parallel_size is 2; with several models"):
        SeveralModels(argparse.Namespace(in_file=(), config=None), EngineConfig(data_parallel_size=2), config)


def test_a_folder_has_models_by_the_names_of_their_files(tmp_path: Path) -> None:
    for name in ("b", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "b" / "config.json").write_text("{}")
    for name in ("a.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "notes.txt"):
        (tmp_path / name).write_text("")
    names = ["a", "b", "big-00001-of-00002"]
    assert [*tables_of(str(tmp_path))] == names
    assert tables_of(str(tmp_path))["a"] == {"path": str(tmp_path / "a.gguf")}
    with pytest.raises(ValueError, match="models_dir is '/nowhere', which cannot be read"):
        tables_of("/nowhere")
    text = f'[a]\npath = "{DEMO}"'
    with pytest.raises(ValueError, match="both have a model 'a'"):
        several(tmp_path, text, models_dir=str(tmp_path))


def test_a_key_may_be_for_some_models(tmp_path: Path) -> None:
    (keys := tmp_path / "keys").write_text("# all\neverything\nlittle a\n")
    text = f'[a]\npath = "{DEMO}"\n[b]\npath = "{DEMO}"'
    config = several(tmp_path, text, api_key_file=str(keys)).config
    assert config.api_key == ("everything", "little") and config.models_of_key == ("little a",)
    keys.write_text("little c\n")
    with pytest.raises(ValueError, match="api_key_file names the model 'c', of which there is no table"):
        several(tmp_path, text, api_key_file=str(keys))
    with pytest.raises(ValueError, match="needs --models"):
        with_all_keys(ServerConfig(api_key_file=str(keys)), {})
    assert os.path.exists(keys)
