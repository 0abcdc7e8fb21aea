"""Train the demo's head for multi-token prediction (MTP), and write it into the demo's folder.

    python demo/train_mtp.py --corpus tinyshakespeare.txt --minutes 35
    python demo/train_mtp.py --corpus tinyshakespeare.txt --trained --minutes 0       # only says how often it is right

The head drafts the tokens after the next one, and the demo verifies them (speculative decoding). Its formula is that of
Qwen3-Next's checkpoints. With the demo's last hidden state h_t and the next token x_{t+1}:

    u_t = fc [ norm(E x_{t+1}) ; norm(h_t) ]        g_t = norm(layer(u_t))        E g_t predicts x_{t+2}

For the token after that the head runs again, with g_t in the place of h_{t+1}, and so on. It is trained on up to DRAFTS
such runs, and learns what the demo itself would say (distillation): the demo's weights stay as they are, bit for bit.
Plain torch, and the data, rows and optimizers are those of `train.py`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load, load_file, save_file
from tokenizers import Tokenizer

from skills import Question, exam
from tasks import read_corpus
from train import CONFIG, QUESTION_WEIGHT, Demo, KeysValues, Muon, Rows, layer_weights

DRAFTS = 3
SHARES = (2, 1, 1)  # of batches with one draft, two and three: so the losses of these count as 1, 0.5 and 0.25
TOKENS = 2048  # in a step
ANSWER_TOKENS = 96  # of the exam, at most


class Drafter(Demo):
    """The demo, whose weights stay, with a head that predicts ahead.

    Args:
        folder: the demo's.
        trained: take the head that is there, too, instead of a new one.
    """

    def __init__(self, folder: Path, trained: bool = False):
        super().__init__(CONFIG)
        self.load(folder)
        self.weights.requires_grad_(False)
        hidden = CONFIG["hidden_size"]
        both = torch.cat((torch.eye(hidden), torch.eye(hidden)), 1) / 2**0.5  # the layer begins with a sum
        head = {"mtp.fc.weight": both, **layer_weights(CONFIG, "mtp.layers.0.")}
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            head[f"mtp.{name}.weight"] = torch.ones(hidden)
        head["mtp.norm.weight"] = self["model.norm"].clone()  # what the head makes goes where the demo's states go
        if trained:
            saved = load_file(folder / "model.safetensors")
            head = {name: saved[name].float() for name in head}
        self.head = {name: torch.nn.Parameter(tensor) for name, tensor in head.items()}
        self.weights.update({name.replace(".", "/"): weight for name, weight in self.head.items()})

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[..., vocab] of [..., hidden]."""
        return F.linear(states, self["model.embed_tokens"])

    def drafts(self, ids: torch.Tensor, hidden: torch.Tensor, most: int = DRAFTS) -> Iterator[torch.Tensor]:
        """States of the first drafts, of the second ones, and so on, as if all earlier ones had been right.

        Args:
            ids: [rows, length].
            hidden: of the demo at all these tokens but the last, [rows, length - 1, hidden].

        Yields:
            g, [rows, length - 1, hidden]. That at t is for token t + 2, and draft number n, from 0, exists from t = n
            on.
        """
        embedded = self.norm(F.embedding(ids[:, 1:], self["model.embed_tokens"]), "mtp.pre_fc_norm_embedding")
        at = torch.arange(ids.shape[1] - 1)
        distance = at[:, None] - at
        kept: KeysValues | None = None
        for n in range(most):
            u = torch.cat((embedded, self.norm(hidden, "mtp.pre_fc_norm_hidden")), -1)
            # A draft sees the keys of known tokens, which the first run made, and those of the drafts before it.
            masks = [distance >= n, *(distance == n - i for i in range(1, n + 1))]
            x, kept = self.layer(F.linear(u, self["mtp.fc"]), "mtp.layers.0.", kept, torch.cat(masks, 1))
            g = self.norm(x, "mtp.norm")
            yield g
            hidden = F.pad(g, (0, 0, 1, 0))[:, :-1]

    def loss(self, ids: torch.Tensor, weights: torch.Tensor, most: int = DRAFTS) -> torch.Tensor:
        """Cross entropy of each of the drafts with what the demo would say there, where it is the one to speak."""
        with torch.no_grad():
            hidden = self.hidden(ids[:, :-1])
        total = torch.zeros(())
        for n, g in enumerate(self.drafts(ids[:, :-1], hidden[:, :-1], most)):
            weight = weights[:, n + 2 :]
            spoken = weight > QUESTION_WEIGHT
            said = self.logits(hidden[:, n + 1 :][spoken]).softmax(-1)
            losses = -(said * self.logits(g[:, n:][spoken]).log_softmax(-1)).sum(-1)
            total = total + (losses * weight[spoken]).sum() / weight[spoken].sum()
        return total

    def optimizers(self, rate: float) -> list[torch.optim.Optimizer]:
        """Of the head alone: Muon for its matrices, and AdamW for its norms."""
        matrices, norms = ([weight for weight in self.head.values() if weight.ndim == n] for n in (2, 1))
        return [
            Muon(matrices, rate, torch.float32),
            torch.optim.AdamW(norms, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
        ]

    def save(self, folder: Path) -> None:
        """Write the head into the demo's folder, beside the demo's own tensors, which are copied bit for bit."""
        file = folder / "model.safetensors"
        head = {name: weight.detach().bfloat16() for name, weight in self.head.items()}
        save_file(load(file.read_bytes()) | head, file, metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


@torch.no_grad()
def answer(model: Drafter, prompts: list[list[int]], end: int) -> list[list[int]]:
    """The prompts with the demo's greedy answers. They are padded at their end, where nothing before can see it."""
    rows = [list(prompt) for prompt in prompts]
    open_rows = rows
    for _ in range(ANSWER_TOKENS):
        if not open_rows:
            break
        longest = max(len(row) for row in open_rows)
        ids = torch.tensor([row + [end] * (longest - len(row)) for row in open_rows])
        last = torch.tensor([len(row) - 1 for row in open_rows])
        hidden = model.hidden(ids)[torch.arange(len(ids)), last]
        best = model.logits(hidden).argmax(-1).tolist()
        for row, token in zip(open_rows, best, strict=True):
            row.append(token)
        open_rows = [row for row in open_rows if row[-1] != end]
    return rows


class Score:
    """Counts drafts that were reached, because all before them were right, and those of them that were right."""

    def __init__(self) -> None:
        self.reached, self.right = [0] * DRAFTS, [0] * DRAFTS

    @torch.no_grad()
    def add(self, model: Drafter, ids: list[int], first: int) -> None:
        """Drafts for all tokens after the one at `first`."""
        row = torch.tensor([ids])
        best = [model.logits(g[0]).argmax(-1) for g in model.drafts(row, model.hidden(row[:, :-1]))]
        for start in range(first - 1, len(ids) - 2):
            for n in range(min(DRAFTS, len(ids) - 2 - start)):
                self.reached[n] += 1
                if best[n][start + n] != ids[start + n + 2]:
                    break
                self.right[n] += 1

    def __str__(self) -> str:
        shares = zip(self.right, self.reached, strict=True)
        return ", ".join(f"{right / max(1, reached):.1%} of {reached}" for right, reached in shares)


def grade(model: Drafter, rows: Rows, questions: list[Question], texts: int = 20) -> dict[str, Score]:
    """Shares of right drafts, of each task of an exam, of all of it, and of the corpus."""
    scores = {"exam": Score()}
    for task in dict.fromkeys(question.task for question in questions):
        score = scores[task] = Score()
        asked = [rows.turn(q.messages, q.tools)[0] + [rows.assistant] for q in questions if q.task == task]
        for prompt, ids in zip(asked, answer(model, asked, rows.end), strict=True):
            score.add(model, ids, len(prompt))
            scores["exam"].add(model, ids, len(prompt))
    scores["text"] = Score()
    for _ in range(texts):
        start = rows.tasks.rng.randrange(len(rows.text) - 256)
        scores["text"].add(model, rows.text[start : start + 256], 1)
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, help="the text that the demo was trained on")
    parser.add_argument("--minutes", type=float, default=35)
    parser.add_argument("--rate", type=float, default=2e-2, help="learning rate at first; it falls to zero")
    parser.add_argument("--trained", action="store_true", help="go on with the head that is there")
    parser.add_argument("--base", type=Path, default=Path(__file__).parent, help="the demo's folder")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    corpus = read_corpus(args.corpus)
    tokenizer = Tokenizer.from_file(str(args.base / "tokenizer.json"))
    model, rows = Drafter(args.base, args.trained), Rows(tokenizer, corpus, args.seed)
    optimizers = model.optimizers(args.rate)
    begun, step = time.monotonic(), 0
    while (spent := (time.monotonic() - begun) / 60) < args.minutes:
        length = rows.tasks.rng.choices((256, 512, 1024), (4, 1, 1))[0]
        most = rows.tasks.rng.choices(range(1, DRAFTS + 1), SHARES)[0]
        loss = model.loss(*rows.batch(TOKENS // length, length, "cpu"), most)
        loss.backward()
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = args.rate * min(1.0, (step + 1) / 30) * (1 - spent / args.minutes)
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        if step % 20 == 0:
            print(f"step {step}, {spent:.1f} min, loss of {most} {loss.item():.4f}", flush=True)
    if step:
        model.save(args.base)
    for name, score in grade(model, rows, exam(corpus, 20, seed=3)).items():
        print(f"{name:10} {score}", flush=True)


if __name__ == "__main__":
    main()
