"""Makes random adapters with PEFT, and writes down what PEFT computes with them.

    python -I oracle_adapters.py CASES.json

It runs in a process that cannot see this project, as oracle.py does. A case has the `folder` of a checkpoint, the place
`out` of its adapter, `prompts`, and the fields `config` of PEFT's LoraConfig. Of prompt i, `out`/oracle.safetensors has
the logits with the adapter, `logits{i}`, and without, `plain{i}`; and PEFT's own model with the adapter in its weights
must give the former, too, unless the case `shares` a weight, which PEFT then changes for both of its uses. With
`virtual` in the place of `config` it is a prompt adapter of so many tokens. Then `logits{i}` begins with theirs,
`tokens{i}` are the greedy tokens that follow, and if the case is `penalized`, `penalized{i}` are those of `generate`
with a repetition penalty of 1.3.
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
            if "lora_embedding_" in name:  # a column of A is the whole of A x
                parameter.normal_(0.0, 1.0 if "_A" in name else parameter.shape[1] ** -0.5 * 0.02)
            elif "lora_" in name:  # A x is about as large as x, and B changes a product by about a tenth
                parameter.normal_(0.0, parameter.shape[1] ** -0.5 * (0.1 if "lora_B" in name else 1.0))
    model.save_pretrained(out)
    found = {}
    with torch.no_grad():
        for i, prompt in enumerate(case["prompts"]):
            found[f"logits{i}"] = model(torch.tensor([prompt])).logits[0].contiguous()
            with model.disable_adapter():
                found[f"plain{i}"] = model(torch.tensor([prompt])).logits[0].contiguous()
        merged = None if case["shares"] else model.merge_and_unload()
        for i, prompt in enumerate(case["prompts"] if merged else ()):
            error = (merged(torch.tensor([prompt])).logits[0] - found[f"logits{i}"]).abs().max().item()
            assert error <= 1e-4 * found[f"logits{i}"].abs().max(), (
                f"{folder.name}: merged, PEFT's model differs by {error}"
            )
    save_file(found, out / "oracle.safetensors")


def make_prompt(case: dict) -> None:
    folder, out, count = Path(case["folder"]), Path(case["out"]), case["virtual"]
    attention = "sdpa" if case["alibi"] else "eager"
    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    # PEFT wants to know of heads, which it does not find in MPT's config, and has no use for.
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=count, num_attention_heads=1)
    model, found = peft.get_peft_model(model, config).eval(), {}
    torch.manual_seed(len(folder.name))
    with torch.no_grad():
        words = model.word_embeddings(torch.arange(model.config.vocab_size))
        embeddings = model.prompt_encoder["default"].embedding.weight
        embeddings.normal_(0.0, words.square().mean().sqrt().item())
        for i, prompt in enumerate(case["prompts"]):
            found[f"logits{i}"] = model(torch.tensor([prompt])).logits[0].contiguous()
            with model.disable_adapter():
                found[f"plain{i}"] = model(torch.tensor([prompt])).logits[0].contiguous()
            tokens = list(prompt)
            for _ in range(case["new"]):
                tokens.append(model(torch.tensor([tokens])).logits[0, -1].argmax().item())
            found[f"tokens{i}"] = torch.tensor(tokens[len(prompt) :])
            if case["penalized"]:
                drawn = {"max_new_tokens": case["new"], "do_sample": False, "repetition_penalty": 1.3}
                ids = torch.tensor([prompt])
                made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **drawn)
                found[f"penalized{i}"] = made[0, len(prompt) :].contiguous()
    model.save_pretrained(out)
    save_file(found, out / "oracle.safetensors")


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for case in json.loads(Path(sys.argv[1]).read_text()):
        (make_prompt if "virtual" in case else make)(case)


if __name__ == "__main__":
    main()
