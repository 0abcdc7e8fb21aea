"""What transformers answers to a prompt with images: JSON with the ids of prompt and answer, and the answer's text.

    python -I answer_oracle.py MODEL PROMPT IMAGE ...

It runs in a process of its own, as tests/oracle.py says. Qwen's Processor needs torchvision; its parts do not.
"""

import json
import sys
import types

import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedTokenizerFast, logging
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

torch.set_num_threads(1)
logging.set_verbosity_error()
logging.disable_progress_bar()
folder, text, *paths = sys.argv[1:]
images, config = [Image.open(path) for path in paths], AutoConfig.from_pretrained(folder)
tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
if config.model_type == "llava":
    processor = LlavaProcessor(
        CLIPImageProcessorPil.from_pretrained(folder), tokenizer, patch_size=config.vision_config.patch_size,
        vision_feature_select_strategy="default", image_token="<image>", num_additional_image_tokens=1,
    )  # fmt: skip
    inputs = {**processor(images=images, text=text, return_tensors="pt")}
elif config.model_type == "gemma3":
    for name, token in ("boi", "<start_of_image>"), ("image", "<image_soft_token>"), ("eoi", "<end_of_image>"):
        setattr(tokenizer, f"{name}_token", token)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    maker = Gemma3ImageProcessorPil.from_pretrained(folder)
    processor = Gemma3Processor(maker, tokenizer, image_seq_length=config.mm_tokens_per_image)
    inputs = {**processor(images=[images], text=text, return_tensors="pt")}
else:
    parts = types.SimpleNamespace(image_token="<|image_pad|>")
    parts.image_processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    made = parts.image_processor(images, return_tensors="pt")
    for i in range(len(images)):
        text = text.replace("<|image_pad|>", Qwen3VLProcessor.replace_image_token(parts, made, i).replace("|", "^"), 1)
    inputs = {**made, **tokenizer(text.replace("^", "|"), return_tensors="pt")}
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == config.image_token_id).int()
if config.model_type != "gemma3":
    inputs.pop("token_type_ids", None)
kind = AutoModelForMultimodalLM
model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
model.generation_config.eos_token_id = None
with torch.no_grad():
    ids = model.generate(**inputs, max_new_tokens=30, do_sample=False, pad_token_id=0)[0]
prompt, answer = ids.tensor_split([inputs["input_ids"].shape[1]])
words = tokenizer.decode(answer, skip_special_tokens=True)
json.dump({"prompt": prompt.tolist(), "tokens": answer.tolist(), "text": words}, sys.stdout)
