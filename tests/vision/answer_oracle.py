"""What transformers answers to a prompt with images, from its files to the text.

    python -I answer_oracle.py MODEL PROMPT IMAGE ...

It runs in a process of its own, as tests/oracle.py says. It writes JSON: the ids of the `prompt` and of 30 greedy
`tokens`, and their `text`. Processors that need torchvision are replaced by what they do beside that.
"""

import importlib
import json
import sys
import types

import torch
import transformers
from PIL import Image


def from_module(path: str, name: str) -> type:
    return getattr(importlib.import_module(f"transformers.models.{path}"), name)


def inputs_of(folder: str, text: str, images: list) -> dict:
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    if config.model_type == "llava":
        processor = from_module("llava.processing_llava", "LlavaProcessor")(
            from_module("clip.image_processing_pil_clip", "CLIPImageProcessorPil").from_pretrained(folder), tokenizer,
            patch_size=config.vision_config.patch_size, vision_feature_select_strategy="default",
            image_token="<image>", num_additional_image_tokens=1,
        )  # fmt: skip
        return {**processor(images=images, text=text, return_tensors="pt")}
    processor = from_module("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil").from_pretrained(
        folder
    )
    made = processor(images, return_tensors="pt")
    self = types.SimpleNamespace(image_processor=processor, image_token="<|image_pad|>")
    replace = from_module("qwen3_vl.processing_qwen3_vl", "Qwen3VLProcessor").replace_image_token
    first, *rest = text.split(self.image_token)
    text = first + "".join(replace(self, made, i) + part for i, part in enumerate(rest))
    tokens = {**tokenizer(text, return_tensors="pt")}
    return {**made, **tokens, "mm_token_type_ids": (tokens["input_ids"] == config.image_token_id).int()}


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder, text, *paths = sys.argv[1:]
    inputs = inputs_of(folder, text, [Image.open(path) for path in paths])
    inputs.pop("token_type_ids", None)
    kind = transformers.AutoModelForMultimodalLM
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    ids = model.generate(**inputs, max_new_tokens=30, do_sample=False, pad_token_id=0)[0].tolist()
    count = inputs["input_ids"].shape[1]
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    answer = tokenizer.decode(ids[count:], skip_special_tokens=True)
    json.dump({"prompt": ids[:count], "tokens": ids[count:], "text": answer}, sys.stdout)


if __name__ == "__main__":
    main()
