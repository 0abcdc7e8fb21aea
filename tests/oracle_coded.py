"""Checkpoints in few bits, made of a random model by other people's packages, and what transformers computes of them.

    python -I oracle_coded.py CASES.json

It runs in a process that cannot see this project, as oracle.py does. A case has the `shape` of a Qwen 3, the `folder`
of its plain checkpoint, which is made if it is not there, the place `out` of the one in few bits, and `prompts`. It
also has `weights`, the arguments of compressed-tensors' quantization, and the `format` in which it stores them; or
`bitsandbytes`, those of transformers' BitsAndBytesConfig; or `gptqmodel`, those of that package's QuantizeConfig, and
the folder `packages` in which the package lies. Of prompt i, `out`/oracle.safetensors has the logits `logits{i}`. Of
the first one it has the greedy tokens `tokens` that follow, too, and by how much each of them is likelier than the next
one, `margins`.

What is computed is what a plain model does with the weights that the package itself reads from its codes. Its products
would round activations, too, which says nothing of how weights are read.
"""

import json
import os
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import Linear

NEW = 200


def plain(folder: str, **more: object) -> torch.nn.Module:
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **more)


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

    model = plain(case["folder"])
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
    model = plain(case["folder"], quantization_config=config, device_map={"": "cpu"})
    model.save_pretrained(case["out"])
    found = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if hasattr(weight, "SCB"):
            found[name] = int8_vectorwise_dequant(weight.data, weight.SCB)
        elif hasattr(weight, "quant_state"):
            found[name] = dequantize_4bit(weight.data, weight.quant_state)
    return found


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
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="t0").save_pretrained(case["folder"])
    made = GPTQModel.load(case["folder"], QuantizeConfig(device="cpu", offload_to_disk=False, **options))
    ids = torch.randint(0, case["shape"]["vocab_size"], (32, 1, 64))
    made.quantize([{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in ids], batch_size=1, backend=backend)
    made.save(out)
    found = {name: x.float() for name, x in load_file(Path(out, "model.safetensors")).items() if x.is_floating_point()}
    found = {name.removesuffix(".weight"): x for name, x in found.items() if name.endswith(".weight")}
    read = GPTQModel.load(out, device="cpu", backend=backend, dtype=torch.float16)  # that of the stored scales
    for name, module in read.model.named_modules():
        if not hasattr(module, "qweight"):
            continue
        module.scales = module.scales.float()  # so that no product is rounded
        if backend == BACKEND.AWQ_TORCH:
            packed = module.qweight, module.qzeros, module.scales
            found[name] = dequantize_gemm(*packed, bits=module.bits, group_size=module.group_size).T
        else:
            found[name] = module.dequantize_weight().T
    return found


def make_plain(case: dict) -> None:
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**case["shape"])).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.15)
    model.save_pretrained(case["folder"])


@torch.no_grad()
def make(case: dict) -> None:
    if not Path(case["folder"], "config.json").exists():
        make_plain(case)
    writers = {"weights": compressed, "bitsandbytes": bitsandbytes, "gptqmodel": gptqmodel}
    weights = next(write for name, write in writers.items() if name in case)(case)
    model, found = plain(case["folder"]), {}
    assert weights
    for name, weight in weights.items():
        model.get_submodule(name).weight.copy_(weight)
    for i, prompt in enumerate(case["prompts"]):
        found[f"logits{i}"] = model(torch.tensor([prompt])).logits[0].contiguous()
    ids = torch.tensor([case["prompts"][0]])
    greedy = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    found["tokens"] = greedy.sequences[0, ids.shape[1] :].contiguous()
    best = torch.cat(greedy.logits).topk(2).values
    found["margins"] = best[:, 0] - best[:, 1]
    save_file(found, Path(case["out"], "oracle.safetensors"))


def main() -> None:
    torch.set_num_threads(1)  # of so small products more threads only wait for each other
    transformers.logging.set_verbosity_error()
    for case in json.loads(Path(sys.argv[1]).read_text()):
        make(case)


if __name__ == "__main__":
    main()
