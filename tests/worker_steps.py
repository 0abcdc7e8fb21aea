"""Workers on tiny models of random weights, and their steps without an engine."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import torch

from batch_state import StepShape
from config import EngineConfig
from device.startup import start_worker
from model_config import ModelConfig
from plan import NewRow
from sampling_params import SamplingParams
from worker import StepRun, Worker

SHAPE = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 97, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "sliding_window": None,
}  # fmt: skip
ONE_LAYER = {"num_hidden_layers": 1}  # for kernels that are interpreted, which takes long
LAYERS = ["sliding_attention", "full_attention"]
WINDOWS = {"architectures": ["MinistralForCausalLM"], "sliding_window": 9, "layer_types": LAYERS}
HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 3, "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3,
}  # fmt: skip
STATE = 4 * 2 * (4 * 4 * 3 + 28 * 2)  # bytes: in 2 layers 4 heads of 4 x 3, and 28 channels' latest 2 inputs


def worker_in(folder: Path, shape: dict | None = None, **fields) -> Worker:
    """A worker on a tiny model of random weights; `shape` changes its config.json, which goes to the folder."""
    (folder / "config.json").write_text(json.dumps(SHAPE | (shape or {})))
    options = {"model": str(folder), "load_format": "dummy", "dtype": "float32", "device": "cpu"}
    options |= {"block_size": 16, "max_num_seqs": 8, "swap_space": 0.001, **fields}
    return start_worker(EngineConfig(**options), ModelConfig.from_folder(str(folder)))


def row(slot: int, tokens: list[int], num_computed: int = 0, num_logprobs: int = -1, temperature: float = 0.0, **more):
    blocks = more.get("blocks", list(range(slot * 8, slot * 8 + 8)))
    sampling = SamplingParams(temperature=temperature).columns
    return NewRow(slot=slot, token_ids=tokens, blocks=[blocks], num_computed=num_computed, sampling=sampling,
                  seed=7, num_logprobs=num_logprobs)  # fmt: skip


class FakeGraph:
    """Stands in for a CUDA graph: `replay` runs the step of one shape again, into the tensors of the first run.

    Graphs share their memory. So a worker's graphs have one buffer of logits, which each replay overwrites.
    """

    def __init__(self, worker: Worker, shape: StepShape):
        self.worker, self.shape, self.replays = worker, shape, 0
        self.ids = worker.forward(StepRun(shape=shape)).zero_()
        model, before = worker.model, [logits for *_, logits in worker.graphs.values()]
        size = worker.config.max_samples, model.config.vocab_size
        self.shared = before[0] if before else torch.zeros(size, dtype=model.dtype, device=model.device)
        worker.graphs[shape] = self, self.ids, self.shared

    def replay(self) -> None:
        self.replays += 1
        run = StepRun(shape=self.shape)
        with torch.inference_mode():
            self.ids.copy_(self.worker.forward(run))
            self.shared.fill_(torch.nan)
            self.shared[: len(run.logits)] = run.logits


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """What `warmup.borrowed` does on a GPU: a view that keeps nothing."""
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
