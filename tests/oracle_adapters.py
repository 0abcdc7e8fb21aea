"""Makes random adapters with PEFT, and writes down what PEFT computes with them.

    python -I oracle_adapters.py CASES.json

It runs in a process that cannot see this project, as oracle.py does. A case has the `folder` of a checkpoint, the place
`out` of its adapter, `prompts`, and the fields `config` of PEFT's LoraConfig. Of prompt i, `out`/oracle.safetensors has
the logits with the adapter, `logits{i}`, and without, `plain{i}`; and PEFT's own model with the adapter in its weights
must give the former, too.
"""

import json
import sys
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import save_file


def make(case: dict) -> None:
    folder, out = Path(case["folder"]), Path(case["out"])
    attention = "sdpa" if case["alibi"] else "eager"  # as in oracle.py
    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **case["config"])).eval()
    torch.manual_seed(len(folder.name))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:  # A x is about as large as x, and B changes a product by about a tenth
                parameter.normal_(0.0, parameter.shape[1] ** -0.5 * (0.1 if "lora_B" in name else 1.0))
    model.save_pretrained(out)
    found = {}
    with torch.no_grad():
        for i, prompt in enumerate(case["prompts"]):
            found[f"logits{i}"] = model(torch.tensor([prompt])).logits[0].contiguous()
            with model.disable_adapter():
                found[f"plain{i}"] = model(torch.tensor([prompt])).logits[0].contiguous()
        merged = model.merge_and_unload()
        for i, prompt in enumerate(case["prompts"]):
            error = (merged(torch.tensor([prompt])).logits[0] - found[f"logits{i}"]).abs().max().item()
            assert error <= 1e-4 * found[f"logits{i}"].abs().max(), (
                f"{folder.name}: merged, PEFT's model differs by {error}"
            )
    save_file(found, out / "oracle.safetensors")


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for case in json.loads(Path(sys.argv[1]).read_text()):
        make(case)


if __name__ == "__main__":
    main()
