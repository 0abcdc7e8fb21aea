"""The command `quantize`: what it writes is read as the rounded numbers, and GPTQ keeps products better than that."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

import reference
from checkpoints import compressed
from checkpoints.compressed import RECIPES, check_target, new_folder
from checkpoints.dequantize import CodedRows, Packed
from checkpoints.gptq import DAMPING, gptq
from checkpoints.hub import checkpoint_files, find_model
from checkpoints.quantization import read_quantization
from checkpoints.rounding import nearest, nearest_of, rounded, scales_of
from checkpoints.storage import Storage, opened
from commands.others import quantize as command
from config import DEMO, EngineConfig
from device import quantize
from device.calibrate import calibrate
from device.coded import stored
from device.loader import load_weights
from device.quantize import QuantizeJob, QuantizeOptions
from engine import LLM
from model import Transformer
from model_config import ModelConfig
from models.quantized import QuantizedWeight
from oracle_checks import first_step, make_worker
from parallel import Group
from sampling_params import SamplingParams
from test_dequantize import build, write
from test_schemes import GPT2, MIXTRAL, PHI3, SMALL
from tokenizer import Tokenizer

NEOX = {
    "architectures": ["GPTNeoXForCausalLM"], "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 64, "rotary_pct": 0.5,
    "hidden_act": "gelu", "layer_norm_eps": 1e-5, "use_parallel_residual": True, "tie_word_embeddings": False,
}  # fmt: skip  # whose q, k and v alternate by heads in one tensor
RAW = {"dense": SMALL, "fused": PHI3, "experts": MIXTRAL, "by heads": NEOX}
PLAIN = {"experts": ["model.layers.0.mlp.gate"], "by heads": ["embed_out"]}  # modules that stay so, beside lm_head
GROUP = {"w4a16": 32}
QUESTION = "<|user|>What is 23 + 58?<|end|><|assistant|>"


def plain(folder: Path, raw: dict[str, Any], dtype: torch.dtype = torch.bfloat16, files: int = 1) -> Path:
    """A plain checkpoint of random weights, in so many files."""
    torch.manual_seed(1)
    write(folder, raw | {"dtype": str(dtype).removeprefix("torch.")}, {"x": torch.ones(1)})
    parts = build(folder).parameters()
    prefix = "gpt_neox." if raw is NEOX else "model."
    tensors = {}
    for name, part in parts.items():
        numbers = torch.randn(part.shape) * 0.1 + (1.0 if "norm" in name else 0.0)
        if not part.instead_of:
            tensors[name if name.startswith(("lm_head", "embed_out")) else prefix + name] = numbers.to(dtype)
    return write(folder, raw | {"dtype": str(dtype).removeprefix("torch.")}, tensors, files)


def job_of(folder: Path, scheme: str) -> QuantizeJob:
    options = QuantizeOptions(str(folder), "", scheme, GROUP.get(scheme))
    return QuantizeJob(options, find_model(EngineConfig(str(folder))))


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in checkpoint_files(str(folder)):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def read_by_us(folder: Path) -> dict[str, torch.Tensor | Packed]:
    """What our own reader finds, by the names of plain tensors."""
    raw = json.loads((folder / "config.json").read_text())
    paths = checkpoint_files(str(folder))
    storage, stored_as = Storage(paths, read_quantization(raw["quantization_config"])), {}
    for path in paths:
        with opened(path) as file:
            for saved in file.keys():  # noqa: SIM118
                if name := storage.name_of(saved):
                    stored_as[name] = storage.open(file, saved)
    return stored_as


def by_formula(numbers: torch.Tensor, scheme: str) -> torch.Tensor:
    """What a matrix is rounded to, written down naively."""
    made = numbers.clone().float()
    for row in made:
        for group in row.split(GROUP.get(scheme, len(row))):
            largest = group[group.abs().argmax()]
            if scheme == "w4a16":
                scale = (largest / -8).to(numbers.dtype).float()
                group.copy_((group / scale).round().clamp(-8, 7) * scale)
            elif scheme == "fp8":
                scale = (largest.abs() / 448).to(numbers.dtype).float()
                group.copy_((group / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale)
            else:
                scale = (largest.abs() / 127).to(numbers.dtype).float()
                group.copy_((group / scale).round().clamp(-127, 127) * scale)
    return made


@pytest.mark.parametrize("scheme", RECIPES)
@pytest.mark.parametrize("raw", RAW)
def test_what_is_written_reads_back_as_the_rounded_numbers(tmp_path: Path, scheme: str, raw: str) -> None:
    source, target = plain(tmp_path / "plain", RAW[raw]), tmp_path / "out"
    job = job_of(source, scheme)
    job.write(target, {})
    before, after = tensors_in(source), read_by_us(target)
    assert after.keys() == before.keys()
    assert {name for name, tensor in after.items() if isinstance(tensor, Packed)} == job.rounds.keys()
    kinds = ("proj.weight", "query_key_value.weight", ".dense.weight", "_4h.weight", "to_h.weight")
    assert job.rounds.keys() == {name for name in before if name.endswith(kinds)}
    for name, tensor in after.items():
        expected = by_formula(before[name], scheme) if name in job.rounds else before[name].float()
        assert torch.equal(tensor.float(), expected), name
    ignored = json.loads((target / "config.json").read_text())["quantization_config"]["ignore"]
    assert {*ignored} == {"lm_head", *PLAIN.get(raw, ())}
    model = Transformer(ModelConfig.from_folder(str(target)), reference, "cpu", torch.float32, 8, Group(), "checkpoint")
    load_weights(model, str(target))
    places = [(owner, name) for owner in model.owners() for name in (*owner.matrices, *owner.stacks)]
    weights = {name: getattr(owner, name) for owner, name in places if getattr(owner, name) is not None}
    assert weights.keys() - {"router"} == {k for k, weight in weights.items() if isinstance(weight, QuantizedWeight)}


@pytest.mark.parametrize(("scheme", "kind"), [("w4a16", "int4"), ("w8a16", "int8"), ("fp8", "fp8")])
def test_the_codes_are_those_of_the_option_quantization(tmp_path: Path, scheme: str, kind: str) -> None:
    """Whose scales are numbers of float16, too, where the checkpoint's weights are."""
    source, target = plain(tmp_path / "plain", SMALL, torch.float16), tmp_path / "out"
    job = job_of(source, scheme)
    job.write(target, {})
    for name, tensor in read_by_us(target).items():
        if isinstance(tensor, Packed):
            expected = rounded(tensors_in(source)[name], kind)
            group = GROUP.get(scheme, 1)
            places = (torch.arange(tensor.shape[0]),), torch.arange(tensor.shape[1]), group, group
            assert expected.read_codes and tensor.read_codes
            read = [coded.read_codes(*places) for coded in (tensor, expected)]
            mine, theirs = ([stored(coded.codes, kind, tensor.shape[1]), *coded[1:]] for coded in read)
            for one, other in zip(mine, theirs, strict=True):
                assert one is other is None or torch.equal(one.float(), other.float()), name


def test_large_checkpoints_are_written_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "SHARD_BYTES", 20_000)
    source, whole, parts = plain(tmp_path / "plain", SMALL, files=3), tmp_path / "whole", tmp_path / "parts"
    job_of(source, "w4a16").write(parts, {})
    monkeypatch.undo()
    job_of(source, "w4a16").write(whole, {})
    names = sorted(path.name for path in parts.glob("*.safetensors"))
    assert len(names) > 2 and names[0] == f"model-00001-of-{len(names):05}.safetensors"
    assert [path.name for path in whole.glob("*.safetensors*")] == ["model.safetensors"]
    index = json.loads((parts / "model.safetensors.index.json").read_text())["weight_map"]
    one, other = tensors_in(parts), tensors_in(whole)
    assert index.keys() == one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert max(path.stat().st_size for path in parts.glob("*.safetensors")) < 30_000


def test_a_run_that_is_cut_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = plain(tmp_path / "plain", SMALL), tmp_path / "out"
    job_of(source, "w8a8").write(target, {})
    before = tensors_in(target)

    def cut_off(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(quantize.compressed, "write_config", cut_off)
    for place in (target, tmp_path / "other"):
        with pytest.raises(KeyboardInterrupt):
            job_of(source, "w4a16").write(place, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "plain"]
    assert tensors_in(target).keys() == before.keys()
    monkeypatch.undo()
    job_of(source, "w4a16").write(target, {})
    assert any(name.endswith("_packed") for name in tensors_in(target))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "plain"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left")])
def test_a_disk_that_is_full_is_said_in_a_line(tmp_path: Path, error: Exception) -> None:
    words = r"^OUT is .*/out, which cannot be written: .*No space left"
    with pytest.raises(ValueError, match=words), new_folder(tmp_path / "out") as folder:
        (folder / "config.json").write_text("{}")
        raise error
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_nobody_may_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions do not hold for root, who may run this."""
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ValueError, match=r"there is no folder .*, or nothing can be written to it"):
        check_target(tmp_path / "out", None, False)


# --- GPTQ -------------------------------------------------------------------------------------------------------------


def drawn(inputs: int, tokens: int = 400, outputs: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix, and correlated inputs for it."""
    torch.manual_seed(inputs)
    mixed = torch.randn(tokens, inputs) @ (torch.eye(inputs) + torch.randn(inputs, inputs) / inputs**0.5)
    return torch.randn(outputs, inputs) * 0.1, mixed


def naive(numbers: torch.Tensor, gram: torch.Tensor, kind: str, group: int) -> torch.Tensor:
    """GPTQ as optimal brain surgeon writes it: after each input, the inverse of what is left is made anew."""
    gram = gram + DAMPING * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    rest, values = numbers.clone(), torch.empty_like(numbers)
    for j in range(numbers.shape[1]):
        if j % group == 0:
            scale = scales_of(rest[:, j : j + group], kind, torch.bfloat16)
        values[:, j] = nearest(rest[:, j, None], scale, kind)[:, 0]
        inverse = torch.linalg.inv(gram[j:, j:])
        rest[:, j:] -= ((rest[:, j] - values[:, j] * scale[:, 0]) / inverse[0, 0])[:, None] * inverse[0]
    return values


@pytest.mark.parametrize(
    ("kind", "inputs", "group"),
    [("int4", 32, 8), ("int4", 48, 24), ("int4", 48, 16), ("int4", 40, 40), ("int8", 24, 24), ("fp8", 24, 24)],
)
def test_gptq_follows_its_formula(kind: str, inputs: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, so that no rounding of a sum decides a code."""
    monkeypatch.setattr("checkpoints.gptq.BLOCK", 16)
    weight, x = (matrix.double() for matrix in drawn(inputs))
    values, scales = gptq(weight, x.T @ x, kind, group, torch.bfloat16)
    assert torch.equal(values, naive(weight, x.T @ x, kind, group))
    assert torch.equal(scales, scales.bfloat16().float()) and scales.shape == (len(weight), inputs // group)


def test_gptq_is_the_nearest_where_no_input_tells_of_another() -> None:
    for inputs in (1, 32):
        weight, gram = drawn(inputs)[0], torch.diag(torch.arange(inputs) + 1.0)
        gram[inputs // 2, inputs // 2] = 0.0  # an input that was never there
        for kind in ("int4", "int8", "fp8"):
            learned = gptq(weight, gram, kind, inputs, torch.bfloat16)
            assert all(map(torch.equal, learned, nearest_of(weight, kind, inputs, torch.bfloat16)))


def numbers_of(found: CodedRows, group: int) -> torch.Tensor:
    return found.codes.float() * found.scales.float().repeat_interleave(group, 1)[:, : found.codes.shape[1]]


@pytest.mark.parametrize("raw", RAW)
def test_all_matrices_learn_and_find_their_places(tmp_path: Path, raw: str) -> None:
    source = plain(tmp_path / "plain", RAW[raw])
    job = job_of(source, "w4a16")
    torch.manual_seed(0)
    chunks = torch.randint(1, 97, (6, 20)).tolist()
    learned = calibrate(job.source, chunks, "int4", 32, torch.bfloat16)
    assert learned.keys() == {name for name in job.rounds.values() if ".experts." not in name}
    before = tensors_in(source)
    for saved, name in job.rounds.items():
        if name in learned:
            weight = before[saved].float()
            error = (numbers_of(learned[name], 32) - weight).norm() / weight.norm()
            assert error < 0.5, name  # rows in wrong places would make it 1.4
    job.write(tmp_path / "out", learned)
    after = read_by_us(tmp_path / "out")
    assert all(torch.equal(after[s].float(), numbers_of(learned[n], 32)) for s, n in job.rounds.items() if n in learned)


def test_what_is_learned_keeps_the_products_of_the_text(tmp_path: Path) -> None:
    """Of the first layer, whose inputs are known here without the engine."""
    source = plain(tmp_path / "plain", SMALL)
    chunks = torch.randint(1, 97, (8, 30), generator=torch.manual_seed(0)).tolist()
    learned = calibrate(find_model(EngineConfig(str(source))), chunks, "int4", 32, torch.bfloat16)
    tensors = {name: tensor.float() for name, tensor in tensors_in(source).items()}
    x = tensors["model.embed_tokens.weight"][torch.tensor(chunks).flatten()]
    x = reference.rms_norm(x, tensors["model.layers.0.input_layernorm.weight"], 1e-6)
    for part in "qkv":
        name = f"layers.0.self_attn.{part}_proj.weight"
        weight = tensors[f"model.{name}"]
        values, scales = nearest_of(weight, "int4", 32, torch.bfloat16)
        errors = [
            float((x @ (numbers - weight).T).square().sum())
            for numbers in (numbers_of(learned[name], 32), values * scales.repeat_interleave(32, 1))
        ]
        assert errors[0] < 0.9 * errors[1]


# --- the command ------------------------------------------------------------------------------------------------------


def by_hand(llm: LLM, prompt: str | list[int]) -> float:
    """The perplexity of a text, or of token ids, that are one chunk."""
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    assert output.prompt_logprobs
    ids, records = output.prompt_token_ids, output.prompt_logprobs
    scores = [record[token].logprob for token, record in zip(ids[1:], records[1:], strict=True) if record]
    assert len(scores) == len(ids) - 1
    return math.exp(-sum(scores) / len(scores))


def test_the_perplexity_is_that_of_the_log_probabilities(tmp_path: Path) -> None:
    job_of(plain(tmp_path / "plain", SMALL), "w4a16").write(tmp_path / "out", {})
    llm = LLM(str(tmp_path / "out"), skip_tokenizer_init=True, dtype="float32", device="cpu")
    chunks = torch.randint(1, 97, (3, 24), generator=torch.manual_seed(0)).tolist()
    measured = quantize.perplexity(EngineConfig(str(tmp_path / "out"), dtype="float32", device="cpu"), chunks)
    logs = [math.log(by_hand(llm, chunk)) for chunk in chunks]  # of equally many tokens
    assert measured == pytest.approx(math.exp(sum(logs) / 3), rel=1e-4)


@pytest.mark.full
def test_the_command_writes_a_model_that_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text((Path(DEMO) / "exam.txt").read_text()[:600])
    target = tmp_path / "out"
    command([DEMO, str(target), "--scheme", "w8a8", "--text", str(text)])
    report = capsys.readouterr().out
    perplexity = re.search(r"perplexity  ([\d.]+) before, ([\d.]+) after, of (\d+) tokens\n", report)
    sizes = re.search(r"size        ([\d.]+) MB before, ([\d.]+) MB after\n", report)
    assert perplexity and sizes and "42 matrices in w8a8, rounded to the nearest" in report
    assert float(sizes[2]) < 0.7 * float(sizes[1])
    llm = LLM(str(target), device="cpu")
    for value, model in ((perplexity[1], LLM(DEMO, device="cpu")), (perplexity[2], llm)):
        assert float(value) == pytest.approx(by_hand(model, text.read_text()), rel=1e-3)
    assert int(perplexity[3]) == len(llm.get_tokenizer().encode(text.read_text()))
    (output,) = llm.generate([QUESTION], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert output.outputs[0].text == "81"
    assert (target / "tokenizer_config.json").read_bytes() == (Path(DEMO) / "tokenizer_config.json").read_bytes()


def logprobs_of(folder: str | Path, chunks: list[list[int]]) -> torch.Tensor:
    """Of every token of the vocabulary after each token of these texts: [tokens, V]."""
    worker = make_worker(Path(folder), max_num_seqs=len(chunks), max_num_batched_tokens=sum(map(len, chunks)))
    return worker.model.logits(first_step(worker, chunks)[1]).log_softmax(-1)


@pytest.mark.full
def test_gptq_costs_less_than_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By how far it takes the model from what it was: the perplexity of a text may fall by chance."""
    text = Path(DEMO) / "exam.txt"
    ids = Tokenizer(DEMO).encode(text.read_text())
    chunks = [ids[begin : begin + 512] for begin in range(0, len(ids), 512)]
    plain_logprobs, divergences = logprobs_of(DEMO, chunks), []
    for options in ([], ["--calibration", str(text)]):
        command([DEMO, str(tmp_path / "out"), "--scheme", "w4a16", "--group-size", "64", "--overwrite", *options])
        logprobs = logprobs_of(tmp_path / "out", chunks)
        divergences.append(float(F.kl_div(logprobs, plain_logprobs, log_target=True, reduction="batchmean")))
    nearest, calibrated = divergences
    assert "rounded by GPTQ with" in capsys.readouterr().out
    assert calibrated < 0.8 * nearest


REFUSED = {
    "unknown scheme": (["MODEL", "OUT", "--scheme", "w3a16"], "invalid choice: 'w3a16'"),
    "no scheme": (["MODEL", "OUT"], "scheme is None; allowed: w4a16, w8a16"),
    "group of another scheme": (["MODEL", "OUT", "--scheme", "fp8", "--group-size", "64"], "group_size is 64; with"),
    "odd group": (["MODEL", "OUT", "--scheme", "w4a16", "--group-size", "48"], "group_size is 48; it must be one of"),
    "no group": (["MODEL", "OUT", "--scheme", "w4a16", "--group-size", "0"], "group_size is 0; it must be one of"),
    "group that does not divide": (["MODEL", "OUT", "--scheme", "w4a16"], "group_size is 128; it must divide the"),
    "no OUT": (["MODEL", "--scheme", "fp8"], "the following arguments are required: OUT"),
    "a third folder": (["MODEL", "--scheme", "fp8", "OUT", "x"], "'x' is one argument too many"),
    "a text that is not there": (["MODEL", "OUT", "--scheme", "fp8", "--text", "none.txt"], "none.txt cannot be read"),
    "a text of one token": (["MODEL", "OUT", "--scheme", "w8a8", "--text", "SHORT"], "and 0 to measure"),
    "OUT is there": (["MODEL", "FULL", "--scheme", "fp8"], "which is there already"),
    "OUT is no model": (["MODEL", "FULL", "--scheme", "fp8", "--overwrite"], "which holds no model"),
    "OUT is MODEL": (["MODEL", "MODEL", "--scheme", "fp8", "--overwrite"], "it must be another folder than MODEL"),
    "OUT is nowhere": (["MODEL", "FULL/no/OUT", "--scheme", "fp8"], "there is no folder"),
    "no safetensors": (["FULL", "OUT", "--scheme", "fp8"], "has no config.json"),
    "quantized already": (["CODED", "OUT", "--scheme", "fp8"], "has its weights in few bits already"),
    "transposed": (["GPT2", "OUT", "--scheme", "fp8"], "GPT2LMHeadModel has shape"),
}  # fmt: skip
PLACES = ("MODEL", "OUT", "FULL", "CODED", "GPT2", "SHORT")


@pytest.mark.parametrize("case", REFUSED)
def test_a_mistake_is_one_line(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, message = REFUSED[case]
    if "MODEL" in words:
        plain(tmp_path / "MODEL", SMALL)
    if "SHORT" in words:
        shutil.copy(Path(DEMO) / "tokenizer.json", tmp_path / "MODEL")
        shutil.copy(Path(DEMO) / "tokenizer_config.json", tmp_path / "MODEL")
        (tmp_path / "SHORT").write_text("a")
    if "CODED" in words:
        job_of(plain(tmp_path / "MODEL", SMALL), "w8a8").write(tmp_path / "CODED", {})
    if "GPT2" in words:
        write(tmp_path / "GPT2", GPT2, {"x": torch.ones(1)})
        tensors = {name: torch.ones(part.shape) for name, part in build(tmp_path / "GPT2").parameters().items()}
        write(tmp_path / "GPT2", GPT2, tensors)
    (tmp_path / "FULL").mkdir()
    (tmp_path / "FULL" / "notes.txt").write_text("x")
    places = [str(tmp_path / word) if word.split("/")[0] in PLACES else word for word in words]
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        command(places)
    errors = capsys.readouterr().err
    assert ended.value.code == 2 and message in errors and errors.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_stacked_experts_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "plain", MIXTRAL, {"x": torch.ones(1)})
    parts = build(tmp_path / "plain").parameters()
    one_by_one = {other for part in parts.values() for other in part.instead_of}
    tensors = {f"model.{name}": torch.ones(part.shape) for name, part in parts.items() if name not in one_by_one}
    source = write(tmp_path / "plain", MIXTRAL, tensors)
    with pytest.raises(ValueError, match=r"tensor model.layers.0.mlp.experts.down_proj .* is refused"):
        job_of(source, "w8a8")


# --- the format's own library -----------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("scheme", RECIPES)
def test_compressed_tensors_reads_the_same_numbers(tmp_path: Path, scheme: str) -> None:
    oracle = pytest.importorskip("compressed_tensors")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    source, target = plain(tmp_path / "plain", SMALL), tmp_path / "out"
    job = job_of(source, scheme)
    job.write(target, {})
    raw = json.loads((target / "config.json").read_text())["quantization_config"]
    config = oracle.QuantizationConfig.model_validate(raw)
    assert config.model_dump()["format"] == RECIPES[scheme].format
    compressor = compressors.BaseCompressor.get_value_from_registry(raw["format"])
    ours, stored = read_by_us(target), tensors_in(target)
    for name in job.rounds:
        module = name.removesuffix("weight")
        parts = {key.removeprefix(module): tensor for key, tensor in stored.items() if key.startswith(module)}
        theirs = compressor.decompress(parts, config.config_groups["group_0"])["weight"]
        assert torch.equal(theirs, ours[name].float().to(theirs.dtype)), name
