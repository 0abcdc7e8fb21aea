"""Makes random tiny checkpoints with transformers, and writes down what transformers computes for them.

    python -I oracle.py CASES.json FOLDER
    python -I oracle.py                        answers lines of JSON: a case of a "name" and a "folder"; the "fields" of
                                               a class, "files" that it reads, or "changes" of a shape, each of which
                                               changes logits or not; or names of settings of "generation"; the answer
                                               is a line of JSON, too

It runs in a process that cannot see this project, because transformers looks for a package called `kernels` and would
find ours.

For each case, `FOLDER/<name>` gets a checkpoint, if it has none yet, and `oracle.safetensors` beside it. That file has
the logits `logits{i}` and the greedy tokens `tokens{i}` of prompt i, or of the prompts that the case's `generated`
names. By `margins{i}` each of these tokens is likelier than the next one.
Entry j of the case's `beams` is a dict of arguments of `generate`: its answers to prompt i are `beams{j}.{i}`, one a
row, filled up with -1, and their scores `scores{j}.{i}`.
A case with a `head` is saved without one for logits: `AutoModel`, or `AutoModelForSequenceClassification`. Of it there
are the hidden states `hidden{i}` of each prompt, or what the classification head says of it, `labels{i}`.
Of the parameters that `zeros` names the last inputs are 0, from its number on.
With `exact`, `exact{i}` are the logits of float64, as far as transformers computes in it.
For each length of the case's `tables`, `table{length}` has cos | sin of that many positions.

`FOLDER/fields.json` has the fields of each case's config class, with their defaults.
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file


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
    more = {"experts_implementation": "eager"} if case.get("exact") else {}  # the others lack float64
    kind = getattr(transformers, case.get("head", "AutoModelForCausalLM"))
    if not (folder / "config.json").exists():
        make_checkpoint(name, case, folder, kind, more)
    attention = "sdpa" if case.get("shape", {}).get("alibi") else "eager"  # Falcon's eager attention adds ALiBi twice
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention, **more)
    if "head" in case:
        with torch.no_grad():
            outputs = [model(torch.tensor([prompt])) for prompt in case["prompts"]]
        found = {
            f"labels{i}" if "logits" in output else f"hidden{i}": output[0][0].contiguous()
            for i, output in enumerate(outputs)
        }
        save_file(found, folder / "oracle.safetensors")
        return
    found = {}
    for i, prompt in enumerate(case["prompts"]):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            found[f"logits{i}"] = model(ids).logits[0].contiguous()
            if i not in case.get("generated", range(i + 1)):
                continue
            mask = torch.ones_like(ids)  # without it a token 0 in the prompt passes for padding
            greedy = model.generate(
                ids, attention_mask=mask, max_new_tokens=case["new"], do_sample=False, pad_token_id=0,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        found[f"tokens{i}"] = greedy.sequences[0, len(prompt) :].contiguous()
        best = torch.cat(greedy.logits).topk(2).values
        found[f"margins{i}"] = best[:, 0] - best[:, 1]
        for j, arguments in enumerate(case.get("beams", [])):
            # The method is named, because `generate` would take a single beam for greedy search, which has no scores.
            beams = model.generate(
                ids, attention_mask=mask, do_sample=False, pad_token_id=-1, return_dict_in_generate=True,
                output_scores=True, custom_generate=transformers.GenerationMixin._beam_search, **arguments,
            )  # fmt: skip
            found[f"beams{j}.{i}"] = beams.sequences[:, len(prompt) :].contiguous()
            found[f"scores{j}.{i}"] = beams.sequences_scores
    if case.get("exact"):
        model.double()
        for i, prompt in enumerate(case["prompts"]):
            with torch.no_grad():
                found[f"exact{i}"] = model(torch.tensor([prompt])).logits[0].float()
        model.float()
    for length in case.get("tables", []):
        rotary, x = model.model.rotary_emb, torch.zeros(1)
        cos, sin = rotary(x, torch.arange(length)[None])
        found[f"table{length}"] = torch.cat((cos[0], sin[0]), dim=-1)
    save_file(found, folder / "oracle.safetensors")


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
        found = getattr(transformers, name)(**raw).to_dict()
    except Exception:
        return {}
    return json.loads(json.dumps(found, default=str))


def random_model(name: str, shape: dict) -> torch.nn.Module:
    """A model in float32 that computes as it does after training."""
    config = getattr(transformers, name)(**json.loads(json.dumps(shape)))
    config.eos_token_id = None
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()


def changed_by(name: str, shape: dict, changes: list[dict]) -> list[str]:
    """Whether logits are the "same" or have "changed" with each change; "error" where there is no such model."""
    torch.manual_seed(0)
    model, prompt, found = random_model(name, shape), torch.arange(3, 27)[None], []
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
                found.append("error")
                continue
            found.append("same" if (logits - want).abs().max() <= 1e-5 * want.abs().max() else "changed")
    return found


def answer(line: str) -> dict:
    """What is asked for by a line of JSON."""
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
        make(name, case, folder / name)
    classes = {case["config"] for case in cases.values()}
    (folder / "fields.json").write_text(json.dumps({name: fields_of(name) for name in sorted(classes)}))


if __name__ == "__main__":
    main()
