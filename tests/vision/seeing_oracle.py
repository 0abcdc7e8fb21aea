"""Makes tiny random models that see with transformers, and writes down what these make of images.

    python -I seeing_oracle.py CASES.json FOLDER

It runs in a process of its own, as tests/oracle.py says. CASES has, by name, a `config` class and its `shape`;
`images`, the shape of each [tiles, height, width]; `ids`, the prompt; and `inputs`, how the family takes pixels.
`FOLDER/<name>` gets the checkpoint and `oracle.safetensors`: the images' pixels `image{i}` uint8, the `logits` of the
prompt, and `new` greedy `tokens` after it.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file


def normalised(pixels: np.ndarray, processor: dict) -> np.ndarray:
    """Pixels [.., 3] as transformers' processors without torchvision make them."""
    scaled = (pixels.astype(np.float64) * processor["rescale_factor"]).astype(np.float32)
    return (scaled - np.array(processor["image_mean"], np.float32)) / np.array(processor["image_std"], np.float32)


def of_qwen(images: list, vision: dict) -> dict:
    """Patches [n, numbers] in the order of merged blocks, and the grids."""
    patch, merge, rows, grids = vision["patch_size"], vision["spatial_merge_size"], [], []
    for image in images:
        (frame,) = image.transpose(0, 3, 1, 2)
        height, width = (size // patch for size in frame.shape[1:])
        parts = np.stack((frame, frame)).reshape(
            1, 2, 3, height // merge, merge, patch, width // merge, merge, patch
        )  # fmt: skip
        rows.append(parts.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(height * width, -1))
        grids.append([1, height, width])
    return {"pixel_values": np.concatenate(rows), "image_grid_thw": np.array(grids)}


def of_sizes(images: list, vision: dict) -> dict:
    """Images of one tile, filled up to the largest, and their sizes."""
    sizes = np.array([image.shape[1:3] for image in images])
    pixels = np.zeros((len(images), 3, *sizes.max(0)), np.float32)
    for to, image in zip(pixels, images, strict=True):
        to[:, : image.shape[1], : image.shape[2]] = image[0].transpose(2, 0, 1)
    return {"pixel_values": pixels, "image_sizes": sizes}


def of_tiles(images: list, vision: dict) -> dict:
    return {"pixel_values": np.concatenate(images).transpose(0, 3, 1, 2)}


def of_nested_tiles(images: list, vision: dict) -> dict:
    return {"pixel_values": of_tiles(images, vision)["pixel_values"][None]}


INPUTS = {"qwen": of_qwen, "sizes": of_sizes, "tiles": of_tiles, "nested": of_nested_tiles}


@torch.no_grad()
def make(name: str, case: dict, folder: Path) -> None:
    torch.manual_seed(len(name))
    config = getattr(transformers, case["config"])(**case["shape"])
    config.eos_token_id = config.text_config.eos_token_id = None
    model = transformers.AutoModelForMultimodalLM.from_config(config).float()
    for part, parameter in model.named_parameters():
        ones = parameter.ndim == 1 and ("norm" in part or "ln_" in part) and part.endswith("weight")
        parameter.normal_(1.0 if ones or "lambda" in part else 0.0, 0.15)
    model.bfloat16().save_pretrained(folder)  # which takes half the room
    kind = transformers.AutoModelForMultimodalLM
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    (folder / "preprocessor_config.json").write_text(json.dumps(case["processor"]))
    pixels = [
        np.random.default_rng(i).integers(0, 256, (*shape[:3], 3), np.uint8) for i, shape in enumerate(case["images"])
    ]
    images, ids = [normalised(image, case["processor"]) for image in pixels], torch.tensor([case["ids"]])
    inputs = {
        key: torch.from_numpy(x) for key, x in INPUTS[case["inputs"]](images, case["shape"]["vision_config"]).items()
    }
    inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs |= {key: torch.tensor(numbers) for key, numbers in case.get("more", {}).items()}
    if case["inputs"] == "qwen":
        inputs["mm_token_type_ids"] = (ids == config.image_token_id).int()
    if case["mutual"]:
        inputs["token_type_ids"] = (ids == config.image_token_id).int() * (case["mutual"] == "image")
    results = {f"image{i}": torch.from_numpy(image) for i, image in enumerate(pixels)}
    results["logits"] = model(**inputs).logits[0].contiguous()
    tokens = model.generate(**inputs, max_new_tokens=case["new"], do_sample=False, pad_token_id=0)
    results["tokens"] = tokens[0, ids.shape[1] :].contiguous()
    save_file(results, folder / "oracle.safetensors")


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name, case in json.loads(Path(sys.argv[1]).read_text()).items():
        make(name, case, Path(sys.argv[2]) / name)


if __name__ == "__main__":
    main()
