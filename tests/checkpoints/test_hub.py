"""Models by name, from a hub on this machine; and folders without a model, refused with what to give instead."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from checkpoints.hub import INDEX, check_id, find_model
from config import DEMO, VERSION, EngineConfig
from engine import LLM, SamplingParams
from gguf_files import write_gguf
from hub_server import TOKEN, Hub, Repo
from model_config import ModelConfig
from models.pooling import settle_task
from served import ROOT, alive, eventually, serving

QUESTION = [{"role": "user", "content": "What is 23 + 58?"}]
CONFIGS = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
KINDS = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense"}  # of modules, and their folders
PACKED = {"quant_algo": "W4A16_AWQ"}
FILES = {name: (Path(DEMO) / name).read_bytes() for name in (*CONFIGS, "model.safetensors")}
JUNK = [
    "README.md", "picture.png", "pytorch_model.bin", "training_args.bin", "consolidated.safetensors", "model.gguf",
    "model-00003-of-00003.safetensors", "original/config.json", "original/tokenizer.model", "onnx/model.onnx",
    "onnx/config.json", "2_Dense/model.safetensors",
]  # fmt: skip
SMALL = ["1_Pooling/config.json", "added_tokens.json", "chat_template.jinja", "modules.json", "tokenizer.model"]


CONFIG = json.loads(FILES["config.json"])


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def shards() -> dict[str, bytes]:
    """Weights in two files, which nobody reads, with their index."""
    weights, names = FILES["model.safetensors"], [f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
    index = {"weight_map": {f"weight {i}": name for i, name in enumerate(names)}}
    half = len(weights) // 2
    return {INDEX: json.dumps(index).encode(), names[0]: weights[:half], names[1]: weights[half:]}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub, which this process and its children use, with a cache that is empty."""
    configs = {name: FILES[name] for name in CONFIGS}
    unknown = as_json(CONFIG | {"architectures": ["Nonesuch"]})
    more = {name: b"{}" + b" " * i for i, name in enumerate([*JUNK, *SMALL])}
    embedder = {
        "modules.json": as_json([{"type": f"models.{kind}", "path": path} for kind, path in KINDS.items()]),
        "1_Pooling/config.json": b'{"pooling_mode": "mean"}',
        "2_Dense/config.json": as_json({"in_features": CONFIG["hidden_size"], "out_features": 8}),
        "2_Dense/pytorch_model.bin": b"x", "2_Dense/README.md": b"y",
    }  # fmt: skip
    tiktoken = {"tiktoken.model": b"", "tokenizer_config.json": b'{"tokenizer_class": "HYTokenizer"}'}
    modelopt = {"quant_method": "modelopt", **PACKED}
    made = Hub(
        {
            "manta/demo": Repo(FILES),
            "manta/gated": Repo(FILES, gated=True),
            "manta/private": Repo(FILES, private=True),
            "manta/sharded": Repo(configs | shards() | more),
            "manta/unknown": Repo(FILES | {"config.json": unknown}),
            "manta/embedder": Repo(FILES | embedder),
            "manta/tiktoken": Repo({name: FILES[name] for name in FILES if name != "tokenizer.json"} | tiktoken),
            "manta/packed": Repo(FILES | {"hf_quant_config.json": as_json({"quantization": PACKED})}),
            "manta/modelopt": Repo(FILES | {"config.json": as_json(CONFIG | {"quantization_config": modelopt})}),
            "manta/bin": Repo(configs | {"pytorch_model.bin": b""}),
            "manta/huge": Repo(FILES, sizes={"model.safetensors": 10**18}),
        },
        moved={"old/demo": "manta/demo"},
    )
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", made.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    yield made
    made.close()


def test_only_what_is_read_is_downloaded_and_once(hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    config = find_model(EngineConfig("manta/sharded"))
    weights = [name for name in hub.repos["manta/sharded"].files if name.startswith("model-") and "00003" not in name]
    assert hub.downloaded("manta/sharded") == sorted([*CONFIGS, *SMALL, INDEX, *weights])
    assert config.model == config.model_name == "manta/sharded" and config.folder.startswith(str(tmp_path / "home"))
    (line,) = capfd.readouterr().err.splitlines()
    assert "manta/sharded: downloading 2 files, 0.01 GB" in line
    assert find_model(EngineConfig("manta/sharded")) == config
    assert len(hub.downloaded("manta/sharded")) == len([*CONFIGS, *SMALL, INDEX, *weights])
    assert capfd.readouterr().err == ""


@pytest.mark.full
def test_overrides_reach_the_process_that_downloads(hub: Hub) -> None:
    architectures = CONFIG["architectures"]
    found = find_model(EngineConfig("manta/unknown", hf_overrides={"architectures": architectures}))
    assert Path(found.folder, "model.safetensors").exists()


@pytest.mark.full
def test_a_copy_in_the_cache_serves_without_the_hub(hub: Hub, monkeypatch, capfd):
    config = find_model(EngineConfig("manta/demo"))
    find_model(EngineConfig("manta/sharded"), weights=False)
    capfd.readouterr()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert find_model(EngineConfig("manta/demo")) == config and capfd.readouterr().err == ""
    with pytest.raises(ValueError, match=r"nor a whole copy in .*, and HF_HUB_OFFLINE is"):
        find_model(EngineConfig("manta/sharded"))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    hub.refuses = 503
    assert find_model(EngineConfig("manta/demo")) == config
    assert "because the hub could not be asked: Server error '503" in capfd.readouterr().err
    hub.close()
    assert find_model(EngineConfig("manta/demo")) == config
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("manta/demo is taken from ") and line.endswith("Connection refused")
    with pytest.raises(ValueError, match=r"^there is no folder manta/sharded, and it cannot be downloaded .* refused"):
        find_model(EngineConfig("manta/sharded"))


def full(*row: Any) -> Any:
    """Each case takes a process that loads huggingface_hub."""
    return pytest.param(*row, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("manta/gated", {}, "is gated: ask for access at http.*, and set HF_TOKEN"),
        full("manta/private", {}, "it has none of that name, or a private one that HF_TOKEN"),
        full("manta/demo", {"revision": "v2"}, "cannot be downloaded from http.*: 404 .*v2"),
        full("manta/demo", {"HF_TOKEN": "wrong"}, "401 .*Invalid credentials"),
        ("manta/demo", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "from http://127.0.0.1:9 .*refused"),
        ("manta/demo", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set: start"),
        full("manta/demo", {"download_dir": f"{DEMO}/config.json"}, "cannot be downloaded .*config.json"),
        full("manta/huge", {}, r"needs 1,000,000,000\.00 GB, and .* has room for"),
        full("manta/unknown", {}, "Nonesuch"),
        full("manta/tiktoken", {}, "its tokenizer_class is 'HYT"),
        full("manta/packed", {}, "the quant_algo 'W4A16_AWQ' of modelopt"),
        full("manta/modelopt", {}, "the quant_algo 'W4A16_AWQ' of modelopt"),
        full("manta/bin", {}, r"has no model\.safetensors, but pytorch_model\.bin; .*: convert it"),
        full("a--b", {}, "there is no folder a--b; --model takes a folder"),
    ],
)
def test_what_goes_wrong_is_one_line_that_says_what_to_do(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, model: str, options: dict, says: str
) -> None:
    for name in [name for name in options if name.startswith("HF_")]:
        monkeypatch.setenv(name, options.pop(name))
    with pytest.raises(ValueError, match=f"^[^\n]*{says}[^\n]*$"):
        find_model(EngineConfig(model, **options))
    assert capfd.readouterr().err == ""
    assert "model.safetensors" not in hub.downloaded(model)


@pytest.mark.full
def test_tokens_revisions_and_names_of_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in ("manta/gated", "manta/private"):
        assert Path(find_model(EngineConfig(name)).folder, "model.safetensors").is_file()
    assert find_model(EngineConfig("old/demo")).model_name == "old/demo"
    commit, place = hub.repos["manta/demo"].commit, str(tmp_path / "place")
    config = find_model(EngineConfig("manta/demo", revision=commit, download_dir=place))
    assert config.folder == f"{place}/models--manta--demo/snapshots/{commit}"


@pytest.mark.full
def test_a_download_that_is_cut_goes_on(hub: Hub) -> None:
    hub.cuts = 1
    found = find_model(EngineConfig("manta/demo"))
    assert hub.cuts == 0 and hub.downloaded("manta/demo").count("model.safetensors") == 2
    assert Path(found.folder, "model.safetensors").read_bytes() == FILES["model.safetensors"]


@pytest.mark.full
def test_a_disk_that_fills_up_is_one_line(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that the library writes take a part of what is written, and no more, as on a full disk."""
    (tmp_path / "sitecustomize.py").write_text("""
import errno, os, pathlib
whole = pathlib.Path.open
def full(self, *args, **options):
    file = whole(self, *args, **options)
    if not self.name.endswith(".incomplete"):
        return file
    class Full:
        def __enter__(self): return self
        def __exit__(self, *args): file.close()
        def tell(self): return file.tell()
        def write(self, data): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return Full()
pathlib.Path.open = full
""")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"^[^\n]* cannot be downloaded from [^\n]*No space left on device[^\n]*$"):
        find_model(EngineConfig("manta/demo"))
    assert not list(tmp_path.rglob("*.incomplete"))


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.full), (signal.SIGKILL, -9)]
)
def test_a_download_ends_with_its_parent_and_leaves_no_part(hub: Hub, tmp_path, number: signal.Signals, code: int):
    hub.holds = threading.Event()
    command = [sys.executable, "server.py", "--port", "0", "--model", "manta/demo"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        eventually(
            lambda: list(tmp_path.rglob("*.incomplete")) and "model.safetensors" in hub.downloaded("manta/demo"), 60
        )
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        # A terminal sends Ctrl-C to all of its processes.
        os.killpg(process.pid, number) if number == signal.SIGINT else process.kill()
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == code
    eventually(lambda: not alive(int(child)))
    assert not list(tmp_path.rglob("*.incomplete"))
    if number == signal.SIGINT:
        message = "manta/demo: the download is interrupted; the files that are complete are kept"
        assert errors.splitlines()[1:] == [message]
    hub.holds.set()


@pytest.mark.full
def test_ranks_that_start_together_download_once(hub: Hub) -> None:
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(find_model, [EngineConfig("manta/demo")] * 2))
    assert found[0] == found[1] and hub.downloaded("manta/demo") == sorted(FILES)


# --- who takes an id --------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_plan_and_made_up_weights_need_no_weights(hub: Hub, capsys: pytest.CaptureFixture) -> None:
    import server

    with pytest.raises(SystemExit):
        server.main(["--plan", "--model", "manta/demo", "--device", "cpu"])
    assert capsys.readouterr().out.startswith("manta/demo: Qwen3ForCausalLM, 2,558,784 parameters")
    find_model(EngineConfig("manta/demo", load_format="dummy"))
    assert hub.downloaded("manta/demo") == CONFIGS


@pytest.mark.full
def test_an_embedder_is_known_by_its_files(hub: Hub) -> None:
    found = find_model(EngineConfig("manta/embedder"), weights=False)
    settled, _ = settle_task(found, ModelConfig.from_folder(found.folder))
    assert (settled.task, settled.pooling_type) == ("embed", "mean")
    assert {name for name in hub.downloaded("manta/embedder") if "_" in name and "/" in name} == {
        "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/pytorch_model.bin"}  # fmt: skip


@pytest.mark.full
def test_a_script_takes_an_id(hub: Hub) -> None:
    from async_llm import AsyncLLM

    with LLM("manta/demo", dtype="float32", device="cpu") as llm:
        (output,) = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert output.outputs[0].text == "81" and llm.config.model == "manta/demo"
    with pytest.raises(ValueError, match="it has none of that name"):
        AsyncLLM(EngineConfig("manta/none"))


@pytest.mark.full
def test_the_server_and_a_batch_take_an_id(hub: Hub, tmp_path: Path) -> None:
    fields = {"messages": QUESTION, "temperature": 0, "max_tokens": 8}
    with serving(tmp_path, "--model", "manta/demo", "--threads", "1") as at:
        status, text = at.post("/v1/chat/completions", fields)
        models = json.loads(at.get("/v1/models")[1])["data"]
        log = at.log.read_text()
    assert status == 200 and json.loads(text)["choices"][0]["message"]["content"] == "81"
    assert [model["id"] for model in models] == ["manta/demo"]
    assert f"Manta {VERSION}: manta/demo\n" in log and "Warning" not in log
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": fields | {"model": "manta/demo"}}
    (tmp_path / "in").write_text(json.dumps(line) + "\n")
    command = [sys.executable, "server.py", "batch", "-i", f"{tmp_path}/in", "-o", f"{tmp_path}/out"]
    command += ["--model", "manta/demo", "--device", "cpu", "--dtype", "float32"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    answer = json.loads((tmp_path / "out").read_text())["response"]["body"]
    assert answer["choices"][0]["message"]["content"] == "81"
    assert hub.downloaded("manta/demo") == sorted(FILES)


def test_a_gguf_file_of_the_hub_is_named_by_its_quantization(hub: Hub, tmp_path, monkeypatch, capfd):
    """It alone is downloaded, with all its parts; and found in the cache, without the hub."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "made"))
    write_gguf(Path(DEMO), tmp_path / "x.gguf", lambda name: "BF16", lambda w, _: w.add_tokenizer_model("no_vocab"))
    content = (tmp_path / "x.gguf").read_bytes()
    files = ["demo-BF16.gguf", "demo.Q8_0.gguf", "Q2_K/demo-Q2_K-00001-of-00002.gguf", "mmproj-BF16.gguf", "README.md"]
    hub.repos["manta/GGUF"] = Repo(dict.fromkeys(files, content))
    config = find_model(EngineConfig("manta/GGUF:bf16"))
    assert hub.downloaded("manta/GGUF") == ["demo-BF16.gguf"]
    assert find_model(EngineConfig("manta/GGUF:demo-BF16.gguf")).folder == config.folder
    assert config.model_name == "manta/GGUF:bf16" and ModelConfig.from_folder(config.folder).num_layers == 6
    assert "manta/GGUF: downloading demo-BF16.gguf" in capfd.readouterr().err
    for model, says in (
        (f"{DEMO}:Q4_K_M", "its GGUF files are none"),
        ("manta/GGUF:Q4_K_M", r"its GGUF files are Q2_K/demo-Q2_K-.*, demo-BF16\.gguf, "),
        ("manta/GGUF", r"has no config\.json, but .*; of GGUF files give one"),
    ):
        with pytest.raises(ValueError, match=says):
            find_model(EngineConfig(model))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert find_model(EngineConfig("manta/GGUF:BF16")).folder == config.folder
    with pytest.raises(ValueError, match="has 0 GGUF files of 'Q8_0'"):
        find_model(EngineConfig("manta/GGUF:Q8_0"))


# --- what is no model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (["config.json", "pytorch_model.bin"], r"has no model\.safetensors, but pytorch_model\.bin; .*: convert it"),
        (["params.json", "consolidated.safetensors"], r"has no config.*, but consolidated.*; Manta reads"),
        (["adapter_config.json", "adapter_model.safetensors"], "is an adapter of org/base: .* --lora-modules NAME="),
        (["config.json"], r"has no model\.safetensors; --model takes a folder"),
        ([], r"has no config\.json; --model takes a folder"),
    ],
)
def test_a_folder_without_a_model_says_what_to_give(tmp_path: Path, files: list[str], says: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    with pytest.raises(ValueError, match=f"^{tmp_path} {says}"):
        find_model(EngineConfig(str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (f"{DEMO}/train.py", "is a file; --model takes a folder"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "there is no folder https:.*; --model takes"),
        ("./nowhere", "there is no folder ./nowhere; --model takes"),
        ("/nowhere:Q8_0", "there is no folder /nowhere:Q8_0; "),
        ("models/org/name", "there is no folder models/org/name; "),
    ],
)
def test_a_file_or_an_address_is_no_model(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_id(name)


def test_a_folder_has_no_revision() -> None:
    with pytest.raises(ValueError, match=f"revision is 'main'; {DEMO} is on this machine, so it must be left out"):
        find_model(EngineConfig(DEMO, revision="main"))
