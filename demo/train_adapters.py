"""Train the demo's two adapters, and write them as PEFT folders in `demo/adapters`.

    python demo/train_adapters.py --corpus tinyshakespeare.txt --minutes 5
    python demo/train_adapters.py --corpus tinyshakespeare.txt --minutes 3 --names products --trained    # go on

`capitals` answers in capital letters; `products` multiplies numbers of one digit, which the demo itself cannot. The
demo's weights stay as they are: only the adapters' A and B are trained (LoRA, Hu et al., 2021). Plain torch, and the
data, rows and loss are those of `train.py`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from skills import FRAMES, SIGNS, Message, asks, says
from tasks import read_corpus
from train import CONFIG, TURNS, Demo, Rows, loss_of

RANK, ALPHA = 8, 16
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LENGTH, ROWS = 256, 16  # tokens of a row, and rows of a step


class Adapted(Demo):
    """The demo, whose weights stay, with an adapter of RANK in each of MODULES."""

    def __init__(self, folder: Path):
        super().__init__(CONFIG)
        self.load(folder)
        self.weights.requires_grad_(False)
        self.a, self.b = torch.nn.ParameterDict(), torch.nn.ParameterDict()
        for name, weight in self.weights.items():
            if name.split("/")[-2] in MODULES:
                self.a[name] = torch.nn.Parameter(torch.randn(RANK, weight.shape[1]) / weight.shape[1] ** 0.5)
                self.b[name] = torch.nn.Parameter(torch.zeros(len(weight), RANK))

    def __getitem__(self, name: str) -> torch.Tensor:
        key = name.replace(".", "/") + "/weight"
        weight = super().__getitem__(name)
        return weight + ALPHA / RANK * self.b[key] @ self.a[key] if key in self.a else weight

    def take(self, folder: Path) -> None:
        """Begin with the adapter of a folder, as `save` wrote it."""
        tensors = load_file(folder / "adapter_model.safetensors")
        for kind, matrices in (("A", self.a), ("B", self.b)):
            for name, matrix in matrices.items():
                matrix.data = tensors[tensor_name(name, kind)].float()

    def save(self, folder: Path, base: str) -> None:
        """Write the adapter as PEFT does."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for kind, matrices in (("A", self.a), ("B", self.b)):
            for name, matrix in matrices.items():
                tensors[tensor_name(name, kind)] = matrix.detach().bfloat16().contiguous()
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": RANK,
            "lora_alpha": ALPHA, "lora_dropout": 0.0, "bias": "none", "target_modules": list(MODULES),
        }  # fmt: skip
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def tensor_name(name: str, kind: str) -> str:
    """PEFT's name for matrix A or B of a weight of the model."""
    return f"base_model.model.{name.replace('/', '.').removesuffix('.weight')}.lora_{kind}.weight"


def in_capitals(rows: Rows) -> list[Message]:
    """A turn of the demo's own, whose answer has capital letters alone."""
    tasks = rows.tasks
    messages = tasks.talk(None) if tasks.rng.random() < 0.3 else tasks.plain() if tasks.rng.random() < 0.2 else []
    if not messages:
        asked, said = tasks.turn({}, TURNS)
        messages = [asks(asked), says(said)]
    question, answer = messages
    return [question, answer | {"content": answer["content"].upper()}]


def product(rows: Rows) -> list[Message]:
    """A question for a product of one digit each, and its answer. There are so few that all of them are learned."""
    rng = rows.tasks.rng
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    question = rng.choice(FRAMES).format(f"{a} {rng.choice(SIGNS['multiply'])} {b}")
    return [asks(question), says(str(a * b))]


ADAPTERS: dict[str, Callable[[Rows], list[Message]]] = {"capitals": in_capitals, "products": product}


def batch(rows: Rows, draw: Callable[[Rows], list[Message]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of conversations, as `Rows.batch` makes them."""
    all_ids, all_weights = [], []
    for _ in range(ROWS):
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < LENGTH:
            turn = rows.turn(draw(rows))
            ids, weights = ids + turn[0], weights + turn[1]
        all_ids.append(ids[:LENGTH])
        all_weights.append(weights[:LENGTH])
    return torch.tensor(all_ids), torch.tensor(all_weights)


@torch.no_grad()
def grade(model: Demo, rows: Rows, draw: Callable[[Rows], list[Message]], count: int = 200) -> float:
    """The share of questions that are answered exactly; see `train.grade`."""
    right = 0
    for _ in range(count):
        ids = rows.turn(draw(rows))[0]
        said = len(ids) - ids[::-1].index(rows.assistant)
        right += model(torch.tensor([ids[:-1]]))[0].argmax(-1)[said - 1 :].tolist() == ids[said:]
    return right / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, help="the text that the demo was trained on")
    parser.add_argument("--minutes", type=float, default=5, help="for each adapter")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate at first; it falls to zero")
    parser.add_argument("--base", type=Path, default=Path(__file__).parent, help="the demo's folder")
    parser.add_argument("--names", nargs="+", default=[*ADAPTERS], choices=ADAPTERS, help="which of them")
    parser.add_argument("--trained", action="store_true", help="go on with the adapters that are there")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    corpus = read_corpus(args.corpus)
    tokenizer = Tokenizer.from_file(str(args.base / "tokenizer.json"))
    for name in args.names:
        draw = ADAPTERS[name]
        torch.manual_seed(args.seed)
        model, rows = Adapted(args.base), Rows(tokenizer, corpus, args.seed)
        if args.trained:
            model.take(args.base / "adapters" / name)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=args.rate, betas=(0.9, 0.98), weight_decay=0.0)
        begun, step, spent = time.monotonic(), 0, 0.0
        while (spent := time.monotonic() - begun) < args.minutes * 60:
            loss = loss_of(model, *batch(rows, draw))
            loss.backward()
            optimizer.param_groups[0]["lr"] = args.rate * min(1.0, (step + 1) / 50) * (1 - spent / (args.minutes * 60))
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 100 == 0:
                print(f"{name}: step {step}, {spent / 60:.1f} min, loss {loss.item():.4f}", flush=True)
        model.save(args.base / "adapters" / name, "demo")
        print(f"{name}: {grade(model, rows, draw):.1%} right", flush=True)


if __name__ == "__main__":
    main()
