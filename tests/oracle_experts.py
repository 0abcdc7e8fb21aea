"""Layers of experts as transformers computes them, with random weights.

    python -I oracle_experts.py CASES.json FILE

It runs in a process that cannot see this project; see oracle.py. CASES has, for each name, the module of transformers,
the classes of layer and configuration, and further fields of the configuration. For each name FILE gets the inputs
`x`, the router's `logits` of them, the weights `gate_up`, `down` [E, out, in] and their biases, the bias `choice` that
helps to choose, each if there is one, and the layer's output `y` without that of shared experts.
"""

import importlib
import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

SIZES = {"hidden_size": 32, "intermediate_size": 16, "moe_intermediate_size": 16, "num_attention_heads": 4}
SHARED = ("shared_expert", "shared_experts")


def make(name: str, case: dict) -> dict[str, torch.Tensor]:
    """The tensors of a case."""
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
    found = {"x": x, "logits": x @ router.weight.T + (0 if bias is None else bias), "y": y}
    found |= {"gate_up": experts.gate_up_proj, "down": experts.down_proj}
    if case.get("transposed"):
        found |= {"gate_up": experts.gate_up_proj.mT, "down": experts.down_proj.mT}
    if hasattr(experts, "gate_up_proj_bias"):
        found |= {"gate_up_bias": experts.gate_up_proj_bias, "down_bias": experts.down_proj_bias}
    for field, tensor in (*layer.named_buffers(), *layer.named_parameters()):
        if field.endswith("e_score_correction_bias"):
            found["choice"] = tensor.flatten()
    return {key: tensor.detach().contiguous().clone() for key, tensor in found.items()}


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    transformers.logging.set_verbosity_error()
    with torch.no_grad():
        made = {f"{name} {key}": tensor for name, case in cases.items() for key, tensor in make(name, case).items()}
    save_file(made, sys.argv[2])


if __name__ == "__main__":
    main()
