"""Makes random tiny models with other people's packages, and writes down what these compute.

    python -I oracle.py CASES.json FOLDER
    python -I oracle.py                        answers lines of JSON: a case of a "name" and a "folder"; the "fields" of
                                               a class, "files" that it reads, or "changes" of a shape, each of which
                                               changes logits or not; or names of settings of "generation"; the answer
                                               is a line of JSON, too

It runs in a process that cannot see this project, because transformers looks for a package called `kernels` and would
find ours. CASES has, by name, what is made in `FOLDER/<name>`; the maker that a case names (`make`) has a part below.

A case without one is a model of transformers. `FOLDER/<name>` gets a checkpoint, if it has none yet, and
`oracle.safetensors` beside it. That file has the logits `logits{i}` and the greedy tokens `tokens{i}` of prompt i, or
of the prompts that the case's `generated` names. By `margins{i}` each of these tokens is likelier than the next one.
Entry j of the case's `beams` is a dict of arguments of `generate`: its answers to prompt i are `beams{j}.{i}`, one a
row, filled up with -1, and their scores `scores{j}.{i}`.
A case with a `head` is an `AutoModel`, an `AutoModelForSequenceClassification` or an `AutoModelForMaskedLM`. Of it
there are the hidden states `hidden{i}` of each prompt, or what the classification head says of it, `labels{i}`. By the
number of a prompt, `seconds` has the first token of the second type.
Of the parameters that `zeros` names the last inputs are 0, from its number on.
With `exact`, `exact{i}` are the logits of float64, as far as transformers computes in it.
For each length of the case's `tables`, `table{length}` has cos | sin of that many positions.

`FOLDER/fields.json` has the fields of each such case's config class, with their defaults.
"""

import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import Linear


def make_checkpoint(name: str, case: dict, folder: Path, kind: type, more: dict) -> None:
    torch.manual_seed(len(name))
    config = getattr(transformers, case["config"])(**case["shape"])
    config.eos_token_id = None  # some classes replace it by their own, which is beyond a tiny vocabulary
    model = kind.from_config(config, attn_implementation="eager", **more).float()
    with torch.no_grad():  # wide enough that the logits differ clearly and every weight matters
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 and parameter.mean() > 0.5 else 0.0, 0.15)
            for part, first in case.get("zeros", {}).items():
                if part in name:
                    parameter[..., first:] = 0.0
            if name.endswith(".A_log"):  # of recurrent states, which then remember some tens of tokens
                parameter.sub_(3.0)
        for name, buffer in model.named_buffers():
            if name.endswith(".layer_scalar"):  # Gemma 4's, which is saved like a weight
                buffer.normal_(0.8, 0.15)
            if name.endswith("e_score_correction_bias"):  # of routers
                buffer.normal_(0.0, 0.15)
    dtype = getattr(torch, case.get("dtype", "float32"))
    model.to(dtype).save_pretrained(folder, max_shard_size=case.get("shard", "1GB"))


def make(name: str, case: dict, folder: Path) -> None:
    options = {"experts_implementation": "eager"} if case.get("exact") else {}  # the others lack float64
    kind = getattr(transformers, case.get("head", "AutoModelForCausalLM"))
    if not (folder / "config.json").exists():
        make_checkpoint(name, case, folder, kind, options)
    attention = "sdpa" if case.get("shape", {}).get("alibi") else "eager"  # Falcon's eager attention adds ALiBi twice
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention, **options)
    if "head" in case:
        body = model.base_model if "MaskedLM" in case["head"] else model
        inputs = [{"input_ids": torch.tensor([prompt])} for prompt in case["prompts"]]
        for i, second in case.get("seconds", {}).items():
            inputs[int(i)]["token_type_ids"] = (torch.arange(len(case["prompts"][int(i)])) >= second).long()[None]
        with torch.no_grad():
            outputs = [body(**kwargs) for kwargs in inputs]
        results = {
            f"labels{i}" if "logits" in output else f"hidden{i}": output[0][0].contiguous()
            for i, output in enumerate(outputs)
        }
        save_file(results, folder / "oracle.safetensors")
        return
    results = {}
    for i, prompt in enumerate(case["prompts"]):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            results[f"logits{i}"] = model(ids).logits[0].contiguous()
            if i not in case.get("generated", range(i + 1)):
                continue
            mask = torch.ones_like(ids)  # without it a token 0 in the prompt passes for padding
            greedy = model.generate(
                ids, attention_mask=mask, max_new_tokens=case["new"], do_sample=False, pad_token_id=0,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        results[f"tokens{i}"] = greedy.sequences[0, len(prompt) :].contiguous()
        best = torch.cat(greedy.logits).topk(2).values
        results[f"margins{i}"] = best[:, 0] - best[:, 1]
        for j, arguments in enumerate(case.get("beams", [])):
            # The method is named, because `generate` would take a single beam for greedy search, which has no scores.
            beams = model.generate(
                ids, attention_mask=mask, do_sample=False, pad_token_id=-1, return_dict_in_generate=True,
                output_scores=True, custom_generate=transformers.GenerationMixin._beam_search, **arguments,
            )  # fmt: skip
            results[f"beams{j}.{i}"] = beams.sequences[:, len(prompt) :].contiguous()
            results[f"scores{j}.{i}"] = beams.sequences_scores
    if case.get("exact"):
        model.double()
        for i, prompt in enumerate(case["prompts"]):
            with torch.no_grad():
                results[f"exact{i}"] = model(torch.tensor([prompt])).logits[0].float()
        model.float()
    for length in case.get("tables", []):
        rotary, x = model.model.rotary_emb, torch.zeros(1)
        cos, sin = rotary(x, torch.arange(length)[None])
        results[f"table{length}"] = torch.cat((cos[0], sin[0]), dim=-1)
    save_file(results, folder / "oracle.safetensors")


def plain(folder: str, **more: object) -> torch.nn.Module:
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32, **{"attn_implementation": "eager"} | more)


# --- adapters ---------------------------------------------------------------------------------------------------------


def base_of(case: dict) -> torch.nn.Module:
    attention = "sdpa" if case["alibi"] else "eager"  # as in `make`
    return plain(case["base"], attn_implementation=attention)


def both_logits(model: torch.nn.Module, case: dict) -> dict[str, torch.Tensor]:
    """Of each prompt, with the adapter and without."""
    logits = {}
    for i, prompt in enumerate(case["prompts"]):
        logits[f"logits{i}"] = model(torch.tensor([prompt])).logits[0].contiguous()
        with model.disable_adapter():
            logits[f"plain{i}"] = model(torch.tensor([prompt])).logits[0].contiguous()
    return logits


@torch.no_grad()
def make_adapter(name: str, case: dict, out: Path) -> None:
    """A random adapter by PEFT, of the `base` of a checkpoint, with the fields `config` of its LoraConfig.

    Of prompt i there are the logits with it, `logits{i}`, and without, `plain{i}`; and PEFT's own model with the
    adapter in its weights must give the former, too, unless the case `shares` a weight, which PEFT then changes for
    both of its uses. A case that is `converted` changes the model's own weights first, and PEFT makes it a plain one.
    """
    import peft

    model, plain_model = base_of(case), base_of(case) if case.get("converted") else None
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **case["config"])).eval()
    if plain_model:
        model.peft_config["default"].init_lora_weights = True
        model.save_pretrained(out / "initial")
        model.peft_config["default"].init_lora_weights = case["config"]["init_lora_weights"]
    torch.manual_seed(len(Path(case["base"]).name))
    for part, parameter in model.named_parameters():
        if "modules_to_save" in part or "trainable_tokens_delta" in part:
            parameter.add_(torch.randn_like(parameter) * 0.05)
        elif "lora_magnitude_vector" in part:
            parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
        elif "lora_B" in part and parameter.ndim == 1:
            parameter.normal_(0.0, 0.05)
        elif plain_model and "lora_" in part:
            parameter.add_(torch.randn_like(parameter) * parameter.std() * 0.1)
        elif "lora_embedding_" in part:  # a column of A is the whole of A x
            parameter.normal_(0.0, 1.0 if "_A" in part else parameter.shape[1] ** -0.5 * 0.02)
        elif "lora_" in part:  # A x is about as large as x, and B changes a product by about a tenth
            parameter.normal_(0.0, parameter.shape[1] ** -0.5 * (0.1 if "lora_B" in part else 1.0))
    if plain_model:
        model.save_pretrained(out, path_initial_model_for_weight_conversion=str(out / "initial"))
    else:
        model.save_pretrained(out)
    results = both_logits(model, case)
    if plain_model:
        results |= {f"plain{i}": plain_model(torch.tensor([p])).logits[0] for i, p in enumerate(case["prompts"])}
    merged = None if case["shares"] else model.merge_and_unload()
    for i, prompt in enumerate(case["prompts"] if merged else ()):
        error = (merged(torch.tensor([prompt])).logits[0] - results[f"logits{i}"]).abs().max().item()
        assert error <= 1e-4 * results[f"logits{i}"].abs().max(), f"{name}: merged, PEFT's model differs by {error}"
    save_file(results, out / "oracle.safetensors")


# --- layers of experts ------------------------------------------------------------------------------------------------

SIZES = {"hidden_size": 32, "intermediate_size": 16, "moe_intermediate_size": 16, "num_attention_heads": 4}
SHARED = ("shared_expert", "shared_experts")


@torch.no_grad()
def make_experts(name: str, case: dict, out: Path) -> None:
    """A layer of experts of a `module` of transformers, with random weights.

    There are the inputs `x`, the router's `logits` of them, the weights `gate_up`, `down` [E, out, in] and their
    biases, the bias `choice` that helps to choose, each if there is one, and the layer's output `y` without that of
    shared experts.
    """
    torch.manual_seed(len(name))
    config = getattr(transformers, case["config"])(**SIZES | case["fields"])
    home = importlib.import_module(f"transformers.models.{case['module']}.modeling_{case['module']}")
    layer = getattr(home, case["layer"])(config).eval()
    for tensor in (*layer.parameters(), *layer.buffers()):
        tensor.copy_(torch.randn(tensor.shape) * 0.5)
    experts, x = layer.experts, torch.randn(40, 32)
    router = layer.gate if hasattr(layer, "gate") else layer.router
    y = layer(x[None])
    y = (y[0] if isinstance(y, tuple) else y).view(40, 32)
    for shared in SHARED:
        if getattr(layer, shared, None) is not None:
            gate = getattr(layer, "shared_expert_gate", None)
            y = y - getattr(layer, shared)(x) * (1 if gate is None else gate(x).sigmoid())
    bias = getattr(router, "bias", None)
    tensors = {"x": x, "logits": x @ router.weight.T + (0 if bias is None else bias), "y": y}
    tensors |= {"gate_up": experts.gate_up_proj, "down": experts.down_proj}
    if case.get("transposed"):
        tensors |= {"gate_up": experts.gate_up_proj.mT, "down": experts.down_proj.mT}
    if hasattr(experts, "gate_up_proj_bias"):
        tensors |= {"gate_up_bias": experts.gate_up_proj_bias, "down_bias": experts.down_proj_bias}
    for field, tensor in (*layer.named_buffers(), *layer.named_parameters()):
        if field.endswith("e_score_correction_bias"):
            tensors["choice"] = tensor.flatten()
    out.mkdir()
    save_file({key: tensor.contiguous().clone() for key, tensor in tensors.items()}, out / "oracle.safetensors")


# --- checkpoints in few bits ------------------------------------------------------------------------------------------

TOKENS = 200


def compressed(case: dict) -> dict[str, torch.Tensor]:
    """Round to nearest, store, and give what the package makes of it again, by the names of modules."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    model = plain(case["base"])
    args = QuantizationArgs(**case["weights"])
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=case["format"])
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], format=case["format"])
    apply_quantization_config(model, config)
    for module in model.modules():
        if not isinstance(module, Linear) or not hasattr(module, "weight_scale"):
            continue
        weight = module.weight.data
        groups = weight.flatten()[None] if args.strategy == "tensor" else weight[:, None]
        groups = weight.unflatten(1, (-1, args.group_size)) if args.group_size else groups
        whole = None
        if hasattr(module, "weight_global_scale"):
            # A power of two, with which the package's own bfloat16 holds each number exactly.
            whole = generate_gparam(weight.min(), weight.max()).log2().floor().exp2()
            module.weight_global_scale.data = whole.view(module.weight_global_scale.shape)
        scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=whole)
        module.weight_scale.data = scales.to(module.weight_scale.dtype).view(module.weight_scale.shape)
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data = zeros.to(module.weight_zero_point.dtype).view(
                module.weight_zero_point.shape
            )
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format=case["format"])
    compressor.compress_model(model)
    model.save_pretrained(case["out"])
    compressor.update_config(case["out"])
    compressor.decompress_model(model)
    return {name: module.weight for name, module in model.named_modules() if isinstance(module, Linear)}


def bitsandbytes(case: dict) -> dict[str, torch.Tensor]:
    """The same by bitsandbytes. Its products in int8 would round activations."""
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant

    config = transformers.BitsAndBytesConfig(**case["bitsandbytes"])
    model = plain(case["base"], quantization_config=config, device_map={"": "cpu"})
    model.save_pretrained(case["out"])
    weights = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if hasattr(weight, "SCB"):
            weights[name] = int8_vectorwise_dequant(weight.data, weight.SCB)
        elif hasattr(weight, "quant_state"):
            weights[name] = dequantize_4bit(weight.data, weight.quant_state)
    return weights


def gptqmodel(case: dict) -> dict[str, torch.Tensor]:
    """The same by GPTQModel: GPTQ or AWQ, calibrated with random tokens. AWQ changes norms, too, so all are given."""
    sys.path.append(case["packages"])
    os.cpu_count = lambda: 8  # with fewer cores it asks for more threads than it has
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
    from tokenizers import Tokenizer, models

    out, options = case["out"], case["gptqmodel"]
    backend = BACKEND.AWQ_TORCH if options.get("method") == "awq" else BACKEND.GPTQ_TORCH
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(case["shape"]["vocab_size"])}, unk_token="t0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="t0").save_pretrained(case["base"])
    made = GPTQModel.load(case["base"], QuantizeConfig(device="cpu", offload_to_disk=False, **options))
    ids = torch.randint(0, case["shape"]["vocab_size"], (32, 1, 64))
    made.quantize([{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in ids], batch_size=1, backend=backend)
    made.save(out)
    weights = {
        name: x.float() for name, x in load_file(Path(out, "model.safetensors")).items() if x.is_floating_point()
    }
    weights = {name.removesuffix(".weight"): x for name, x in weights.items() if name.endswith(".weight")}
    read = GPTQModel.load(out, device="cpu", backend=backend, dtype=torch.float16)  # that of the stored scales
    for name, module in read.model.named_modules():
        if not hasattr(module, "qweight"):
            continue
        module.scales = module.scales.float()  # so that no product is rounded
        if backend == BACKEND.AWQ_TORCH:
            packed = module.qweight, module.qzeros, module.scales
            weights[name] = dequantize_gemm(*packed, bits=module.bits, group_size=module.group_size).T
        else:
            weights[name] = module.dequantize_weight().T
    return weights


def make_plain(case: dict) -> None:
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**case["shape"])).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.15)
    model.save_pretrained(case["base"])


@torch.no_grad()
def make_coded(name: str, case: dict, out: Path) -> None:
    """A checkpoint in few bits, made of a Qwen 3 of a `shape`, whose plain one is in `base`; it is made if need be.

    The case has `weights`, the arguments of compressed-tensors' quantization, and the `format` in which it stores them;
    or `bitsandbytes`, those of transformers' BitsAndBytesConfig; or `gptqmodel`, those of that package's
    QuantizeConfig, and the folder `packages` in which the package lies. Of prompt i there are the logits `logits{i}`.
    Of the first one there are the greedy `tokens` that follow, too, and by how much each of them is likelier than the
    next one, `margins`.

    What is computed is what a plain model does with the weights that the package itself reads from its codes. Its
    products would round activations, too, which says nothing of how weights are read.
    """
    case |= {"out": str(out)}
    if not Path(case["base"], "config.json").exists():
        make_plain(case)
    writers = {"weights": compressed, "bitsandbytes": bitsandbytes, "gptqmodel": gptqmodel}
    weights = next(write for name, write in writers.items() if name in case)(case)
    model, results = plain(case["base"]), {}
    assert weights
    for name, weight in weights.items():
        model.get_submodule(name).weight.copy_(weight)
    for i, prompt in enumerate(case["prompts"]):
        results[f"logits{i}"] = model(torch.tensor([prompt])).logits[0].contiguous()
    ids = torch.tensor([case["prompts"][0]])
    greedy = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    results["tokens"] = greedy.sequences[0, ids.shape[1] :].contiguous()
    best = torch.cat(greedy.logits).topk(2).values
    results["margins"] = best[:, 0] - best[:, 1]
    save_file(results, out / "oracle.safetensors")


# --- questions --------------------------------------------------------------------------------------------------------


def fields_of(name: str) -> dict:
    """The fields of a config class beyond those that all have, with their defaults."""
    common = {field.name for field in dataclasses.fields(transformers.PretrainedConfig)}
    fields = [field for field in dataclasses.fields(getattr(transformers, name)) if field.name not in common]
    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in fields
    }


def as_read(name: str, raw: dict) -> dict:
    """All that a config class makes of a config.json, its defaults among them; empty where it errs."""
    try:
        fields = getattr(transformers, name)(**raw).to_dict()
    except Exception:
        return {}
    return json.loads(json.dumps(fields, default=str))


def random_model(name: str, shape: dict) -> torch.nn.Module:
    """A model in float32 that computes as it does after training."""
    config = getattr(transformers, name)(**json.loads(json.dumps(shape)))
    config.eos_token_id = None
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()


def changed_by(name: str, shape: dict, changes: list[dict]) -> list[str]:
    """Whether logits are the "same" or have "changed" with each change; "error" where there is no such model."""
    torch.manual_seed(0)
    model, prompt, words = random_model(name, shape), torch.arange(3, 27)[None], []
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.ndim == 1 and parameter.mean() > 0.5 else 0.0, 0.15)
    with torch.no_grad():
        want, state = model(prompt).logits, model.state_dict()
        for change in changes:
            try:
                model = random_model(name, shape | change)
                model.load_state_dict(state)
                logits = model(prompt).logits
            except Exception:
                words.append("error")
                continue
            words.append("same" if (logits - want).abs().max() <= 1e-5 * want.abs().max() else "changed")
    return words


def answer(line: str) -> dict:
    """The answer to a line of JSON."""
    case = json.loads(line)
    if "fields" in case:
        return fields_of(case["fields"])
    if "files" in case:
        return {"read": [as_read(case["config"], raw) for raw in case["files"]]}
    if "generation" in case:
        return {"names": sorted(transformers.GenerationConfig._get_default_generation_params())}
    if "changes" in case:
        return {"found": changed_by(case["config"], case["shape"], case["changes"])}
    try:
        make(case["name"], case, Path(case["folder"]))
    except Exception as error:
        return {"error": repr(error)}
    return {}


MAKERS = {
    "model": make, "adapter": make_adapter, "experts": make_experts, "coded": make_coded,
}  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)  # more would wait for each other
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if len(sys.argv) == 1:
        for line in sys.stdin:
            print(json.dumps(answer(line)), flush=True)
        return
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    for name, case in cases.items():
        MAKERS[case.get("make", "model")](name, case, folder / name)
    classes = {case["config"] for case in cases.values() if "make" not in case}
    (folder / "fields.json").write_text(json.dumps({name: fields_of(name) for name in sorted(classes)}))


if __name__ == "__main__":
    main()
