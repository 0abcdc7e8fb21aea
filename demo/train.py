"""Train the bundled demo model and write it as a Hugging Face folder (Qwen3 layout).

    python demo/train.py --corpus tinyshakespeare.txt --minutes 120                               # from nothing
    python demo/train.py --corpus tinyshakespeare.txt --minutes 60 --init demo --rate 1e-3        # from what there is
    python demo/train.py --corpus tinyshakespeare.txt --minutes 60 --init demo --blend 0.5        # halfway back to it

Plain torch, one file, CPU or GPU. The schedule runs over wall-clock minutes, so the same command suits a laptop and a
GPU; the checkpoint it leaves in `--work` lets a later run go on (`--resume`). The optimizer is Muon (Jordan et al.,
2024) for the matrices and AdamW for the rest. What a model learns in a short training costs it some of what it knew: a
mean of its weights before and after (`--blend`; Wortsman et al., 2022) keeps most of both.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from natural import Spoken, is_held_back
from skills import Message, SkillTasks, asks, exam, says
from tasks import Tasks, read_corpus

CONFIG: dict[str, Any] = {  # config.json of the model
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 1024, "hidden_size": 192,
    "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None,
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "bos_token_id": None, "eos_token_id": 1, "use_sliding_window": False, "initializer_range": 0.02,
}  # fmt: skip
SPECIAL = ["<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
# A tool is shown by the names of its parameters, and of their values where they are few: the context is short.
TEMPLATE = """
{%- if tools %}
    {{- '<|system|>' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n' }}
        {%- set messages = messages[1:] %}
    {%- endif %}
    {{- 'Tools:' }}
    {%- for tool in tools %}
        {{- '\\n' + tool.function.name + '(' }}
        {%- for name, schema in ((tool.function.parameters or {}).properties or {}).items() %}
            {{- ', ' if not loop.first }}
            {{- name }}
            {{- ': ' + schema.enum | join('|') if schema.enum }}
        {%- endfor %}
        {{- ')' }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|user|><tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|' + message['role'] + '|>' + message['content'] }}
    {%- endif %}
    {%- for call in message.tool_calls %}
        {{- '\\n' if message.content or not loop.first }}
        {{- '<tool_call>\\n{"name": ' + call.function.name | tojson }}
        {{- ', "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
""".strip()
QUESTION_WEIGHT, TEXT_WEIGHT = 0.05, 0.3  # weights of a token's loss; an answer's is 1
TURNS = (5, 6, 5, 5, 4, 16, 0.3)
TURNS_WITH_TOOLS = (0, 0, 2, 2, 3, 6, 0.3)

KeysValues = tuple[torch.Tensor, torch.Tensor]


def make_tokenizer(corpus: str) -> Tokenizer:
    """Byte-level BPE with single digits, trained on the corpus and on a sample of the tasks."""
    tokenizer = Tokenizer(models.BPE())
    pattern = r"\p{N}|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tasks = Tasks(corpus, seed=0)
    sample = [f"{q}\n{a}" for _ in range(300) for q, a in tasks.conversation(1500)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"], special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([corpus, *sample], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


class Rows:
    """Rows of `length` tokens with a loss weight each: one long conversation, or a stretch of the corpus."""

    def __init__(self, tokenizer: Tokenizer, corpus: str, seed: int):
        self.encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
        self.tasks = SkillTasks(corpus, seed)
        self.spoken = Spoken(self.tasks)
        self.text = self.encode(corpus)
        self.end, self.assistant = (self.encode(SPECIAL[i])[0] for i in (1, 4))
        environment = jinja2.Environment()
        environment.filters["tojson"] = json.dumps  # Jinja's own would sort keys and escape HTML
        self.template = environment.from_string(TEMPLATE)

    def turn(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> tuple[list[int], list[float]]:
        """Ids of these messages, and their weights: the assistant's words and what ends them are to be learned."""
        ids, weights, said = self.encode(self.template.render(messages=messages, tools=tools)), [], False
        for id in ids:
            weights.append(1.0 if said else QUESTION_WEIGHT)
            said = id == self.assistant or (said and id != self.end)
        return ids, weights

    def row(self, length: int) -> tuple[list[int], list[float]]:
        rng = self.tasks.rng
        if rng.random() < 0.06:
            start = rng.randrange(len(self.text) - length)
            return self.text[start : start + length], [TEXT_WEIGHT] * length
        box = self.tasks.toolbox() if rng.random() < (0.45 if length < 512 else 0.3) else None
        known: dict[str, str] = {}
        ids: list[int] = []
        weights: list[float] = []
        head, tools = self.tasks.system(), box.tools if box else None
        while len(ids) < length:
            told = dict(known)
            if rng.random() < (0.08 if box else 0.16):
                messages = self.tasks.talk(box)
            elif rng.random() < (0.15 if box else 0.6):
                messages = self.spoken.turn(told, bool(box))
            elif rng.random() < (0.75 if box else 0.3):
                messages = self.tasks.skill(box)
            else:
                question, answer = self.tasks.turn(told, TURNS_WITH_TOOLS if box else TURNS)
                messages = [asks(question), says(answer)]
            if is_held_back(messages):
                continue
            known = told
            turn = self.turn(head + messages, tools)
            ids, weights = ids + turn[0], weights + turn[1]
            head, tools = [], None  # these stand before the first turn alone
        return ids[:length], weights[:length]

    def batch(self, rows: int, length: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = [self.row(length) for _ in range(rows)]
        ids, weights = (torch.tensor([row[i] for row in drawn], device=device) for i in (0, 1))
        return ids, weights


def layer_weights(c: dict, at: str) -> dict[str, torch.Tensor]:
    """Weights that a decoder layer begins with. Their names begin with `at`."""
    heads, kv, dim, hidden = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"], c["hidden_size"]
    shapes = {"self_attn.q_proj": (heads * dim, hidden), "self_attn.k_proj": (kv * dim, hidden),
              "self_attn.v_proj": (kv * dim, hidden), "self_attn.o_proj": (hidden, heads * dim),
              "mlp.gate_proj": (c["intermediate_size"], hidden), "mlp.up_proj": (c["intermediate_size"], hidden),
              "mlp.down_proj": (hidden, c["intermediate_size"])}  # fmt: skip
    weights = {}
    for name, shape in shapes.items():
        out = 0.0 if name.endswith(("o_proj", "down_proj")) else 1.0  # residual branches begin silent
        weights[f"{at}{name}.weight"] = torch.randn(shape) * out / math.sqrt(shape[1])
    for name, size in (("input_layernorm", hidden), ("post_attention_layernorm", hidden),
                       ("self_attn.q_norm", dim), ("self_attn.k_norm", dim)):  # fmt: skip
        weights[f"{at}{name}.weight"] = torch.ones(size)
    return weights


class Demo(torch.nn.Module):
    """Qwen3 in its smallest form. Parameter names are those of the checkpoint, so saving is `state_dict()`."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, c: dict):
        super().__init__()
        self.c = c
        dim, hidden = c["head_dim"], c["hidden_size"]
        weights = {"model.embed_tokens.weight": torch.randn(c["vocab_size"], hidden) * 0.02}
        for i in range(c["num_hidden_layers"]):
            weights |= layer_weights(c, f"model.layers.{i}.")
        weights["model.norm.weight"] = torch.ones(hidden)
        self.weights = torch.nn.ParameterDict({k.replace(".", "/"): torch.nn.Parameter(v) for k, v in weights.items()})
        angle = torch.outer(
            torch.arange(c["max_position_embeddings"]), c["rope_theta"] ** -(torch.arange(0, dim, 2) / dim)
        )
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def load(self, folder: Path) -> None:
        """Take the weights of a folder, all but those of a head that predicts ahead: `train_mtp.py` trains that."""
        state = load_file(folder / "model.safetensors")
        base = {name.replace(".", "/"): tensor.float() for name, tensor in state.items() if not name.startswith("mtp.")}
        self.weights.load_state_dict(base)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.weights[name.replace(".", "/") + "/weight"]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self[name], self.c["rms_norm_eps"])

    def layer(
        self, x: torch.Tensor, at: str, earlier: KeysValues | None = None, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, KeysValues]:
        """One decoder layer, whose weights' names begin with `at`.

        Args:
            x: [rows, length, hidden].
            earlier: keys and values that stand before those of x, [rows, heads, any, dim] each.
            mask: bool [length, any + length], which of them each token sees; None: those up to its own.

        Returns:
            The layer's output, and all its keys and values.
        """
        c, (rows, length, _) = self.c, x.shape
        cos, sin = self.cos[:length], self.sin[:length]
        dtype = torch.bfloat16 if torch.is_autocast_enabled(x.device.type) else torch.float32

        def heads(x, norm=None):
            x = x.view(rows, length, -1, c["head_dim"])
            if norm:
                x1, x2 = self.norm(x, norm).transpose(1, 2).chunk(2, -1)
                return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).to(dtype)
            return x.transpose(1, 2)

        y = self.norm(x, at + "input_layernorm")
        q, k, v = (F.linear(y, self[f"{at}self_attn.{n}_proj"]) for n in "qkv")
        q, k, v = heads(q, at + "self_attn.q_norm"), heads(k, at + "self_attn.k_norm"), heads(v).to(dtype)
        if earlier:
            k, v = torch.cat((earlier[0], k), 2), torch.cat((earlier[1], v), 2)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        x = x + F.linear(y.transpose(1, 2).reshape(rows, length, -1), self[at + "self_attn.o_proj"])
        y = self.norm(x, at + "post_attention_layernorm")
        y = F.silu(F.linear(y, self[at + "mlp.gate_proj"])) * F.linear(y, self[at + "mlp.up_proj"])
        return x + F.linear(y, self[at + "mlp.down_proj"]), (k, v)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """What the head multiplies, [rows, length, hidden], of ids [rows, length]."""
        x = F.embedding(ids, self["model.embed_tokens"])
        for i in range(self.c["num_hidden_layers"]):
            x, _ = self.layer(x, f"model.layers.{i}.")
        return self.norm(x, "model.norm")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [rows, length, vocab] of ids [rows, length]."""
        return F.linear(self.hidden(ids), self["model.embed_tokens"])


class Muon(torch.optim.Optimizer):
    """Muon as torch has it, with the step size of AdamW; but torch computes in bfloat16, which old CPUs do slowly.

    Args:
        weights: matrices.
        lr: learning rate.
        dtype: of the products.
    """

    def __init__(self, weights: list[torch.nn.Parameter], lr: float, dtype: torch.dtype):
        super().__init__(weights, {"lr": lr})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # this loop passes no closure
        """Momentum of 0.95, looking ahead (Nesterov), made orthogonal; with a weight decay of 0.01."""
        for group in self.param_groups:
            for weight in group["params"]:
                assert weight.grad is not None
                state, lr = self.state[weight], group["lr"]
                momentum = state.setdefault("momentum", torch.zeros_like(weight)).lerp_(weight.grad, 0.05)
                update = orthogonal(weight.grad.lerp(momentum, 0.95).to(self.dtype))
                weight.mul_(1 - lr * 0.01).add_(update, alpha=-0.2 * lr * math.sqrt(max(weight.shape)))


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """Nearly the closest orthogonal matrix to `x`, by five Newton-Schulz steps with Jordan's coefficients."""
    wide = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), wide, beta=3.4445)
    return wide if x.shape[0] <= x.shape[1] else wide.T


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    logits = model(ids[:, :-1])
    losses = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (losses * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()


@torch.no_grad()
def grade(model: Demo, rows: Rows, corpus: str, device: str, each: int = 100) -> dict[str, float]:
    """Share of held-out questions answered exactly, in one pass: a greedy answer is right if each argmax is."""
    right: dict[str, float] = {}
    for task, messages, answer, tools in exam(corpus, each, seed=1):
        if task != "json":  # of which there is more than one right answer
            ids = rows.turn([*messages, answer], tools)[0]
            said = len(ids) - ids[::-1].index(rows.assistant)  # where the answer begins
            best = model(torch.tensor([ids[:-1]], device=device))[0].argmax(-1)
            right[task] = right.get(task, 0) + (best[said - 1 :].tolist() == ids[said:])
    return {task: count / each for task, count in right.items()}


@torch.no_grad()
def blend(model: Demo, folder: Path, share: float) -> None:
    """Take the mean of the model's weights, which count by `share`, and of the folder's."""
    trained = {name: weight.clone() for name, weight in model.weights.items()}
    model.load(folder)
    for name, weight in model.weights.items():
        weight.lerp_(trained[name], share)


def save(model: Demo, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the folder that `server.py --model` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {k.replace("/", "."): v.detach().to("cpu", torch.bfloat16) for k, v in model.weights.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "config.json": CONFIG,
        "generation_config.json": {"eos_token_id": [1, 0], "pad_token_id": 0, "temperature": 0.3},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONFIG["max_position_embeddings"],
            "bos_token": None, "eos_token": "<|end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE,
            "clean_up_tokenization_spaces": False,
        },
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, help="plain text to learn the language from")
    parser.add_argument("--minutes", type=float, default=120, help="length of the whole schedule")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where the model's files go")
    parser.add_argument("--work", type=Path, default=Path("/tmp/manta-demo.pt"), help="checkpoint to resume from")
    parser.add_argument("--resume", action="store_true", help="go on from --work")
    parser.add_argument("--init", type=Path, help="folder of a model to begin with, its weights and its tokenizer")
    parser.add_argument("--blend", type=float, default=1.0, help="share of what was trained; the rest is --init's")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate before it falls")
    parser.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="float32 is faster on old CPUs"
    )
    parser.add_argument("--warmup", type=int, default=100, help="steps in which the rate rises")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens in a step")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    precision = torch.autocast(device, torch.bfloat16, enabled=args.dtype == "bfloat16")
    torch.manual_seed(args.seed)
    corpus = read_corpus(args.corpus)
    model = Demo(CONFIG).to(device)
    if args.init:
        tokenizer = Tokenizer.from_file(str(args.init / "tokenizer.json"))
        model.load(args.init)
    else:
        tokenizer = make_tokenizer(corpus)
    compiled = torch.compile(model, dynamic=False)
    matrices = [p for n, p in model.weights.items() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.weights.items() if p.ndim == 1 or "embed" in n]
    optimizers = [
        Muon(matrices, args.rate, getattr(torch, args.dtype)),
        torch.optim.AdamW(others, lr=args.rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    spent, step = 0.0, 0
    if args.resume:
        saved = torch.load(args.work, map_location=device)
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        spent, step = saved["spent"], saved["step"]
    rows = Rows(tokenizer, corpus, seed=args.seed + step)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters on {device}", flush=True)
    reported = kept = time.monotonic()
    tokens = 0
    while spent < args.minutes * 60:
        begun = time.monotonic()
        progress = spent / (args.minutes * 60)
        # Constant, then linear to zero over the last 40% (a "WSD" schedule), after the warm-up.
        scale = min(1.0, (step + 1) / args.warmup, (1 - progress) / 0.4)
        # Short rows first: copying from nearby is learned at once there, and distance is then only a matter of degree.
        length = rows.tasks.rng.choices((256, 512, 1024), (4, 1, 1) if progress < 0.5 else (2, 1, 2))[0]
        ids, weights = rows.batch(args.tokens // length, length, device)
        with precision:
            loss = loss_of(compiled, ids, weights)
        loss.backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = scale * peaks[optimizers.index(optimizer)]
            optimizer.step()
            optimizer.zero_grad()
        step, tokens = step + 1, tokens + ids.numel()
        spent += time.monotonic() - begun
        if time.monotonic() - reported > 60:
            rate = tokens / (time.monotonic() - reported)
            print(f"{spent / 60:6.1f} min  step {step}  loss {loss.item():.3f}  {rate:,.0f} tok/s", flush=True)
            reported, tokens = time.monotonic(), 0
        if time.monotonic() - kept > 600:
            with precision:
                print(f"{spent / 60:6.1f} min ", grade(model, rows, corpus, device), flush=True)
            states = [optimizer.state_dict() for optimizer in optimizers]
            torch.save({"model": model.state_dict(), "optimizers": states, "spent": spent, "step": step}, args.work)
            save(model, tokenizer, args.out)
            kept = reported = time.monotonic()
    if args.init:
        blend(model, args.init, args.blend)
    save(model, tokenizer, args.out)
    with precision:
        print(grade(model, rows, corpus, device, each=400), flush=True)


if __name__ == "__main__":
    main()
