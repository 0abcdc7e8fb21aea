"""The demo's head that predicts ahead, as it is trained: its formula, what it learns, and its file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from config import DEMO
from skills import exam
from train import CONFIG, Demo, Rows
from train_mtp import DRAFTS, Drafter, Score

FOLDER = Path(DEMO)
FILES = ("config.json", "model.safetensors", "tokenizer.json")
SYLLABLES = ("ba", "do", "fen", "gil", "ho", "kum", "la", "mer")
CORPUS = "\n".join(" ".join(f"{a}{b}{c}" for c in SYLLABLES) for a in SYLLABLES for b in SYLLABLES)
NAMES = {"mtp.fc", "mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"} | {
    f"mtp.layers.0.{part}"
    for part in (
        "input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm",
        "self_attn.k_norm",
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> Rows:
    return Rows(Tokenizer.from_file(str(FOLDER / "tokenizer.json")), CORPUS, seed=0)


def untrained() -> Drafter:
    """The demo with a head of random weights, no part of which is silent."""
    torch.manual_seed(0)
    model = Drafter(FOLDER)
    for weight in model.head.values():
        weight.data = torch.rand_like(weight) + 0.5 if weight.ndim == 1 else torch.randn_like(weight) * 0.1
    return model


class Served:
    """The head as it is served: one position at a time, in float64, over the keys and values that it has kept."""

    def __init__(self, model: Drafter):
        self.w = {name.removesuffix(".weight"): weight.detach().double() for name, weight in model.head.items()}
        self.embedding = model["model.embed_tokens"].double()
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]).sqrt() * self.w[name]

    def turned(self, x: torch.Tensor, name: str, position: int) -> torch.Tensor:
        """Heads, normed and turned by their position (RoPE)."""
        half = CONFIG["head_dim"] // 2
        angle = position * CONFIG["rope_theta"] ** -(torch.arange(half).double() / half)
        left, right = self.norm(x.view(-1, 2 * half), name).chunk(2, -1)
        return torch.cat((left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()), -1)

    def step(self, hidden: torch.Tensor, token: int, position: int) -> torch.Tensor:
        """g of this position; it keeps the position's key and value."""
        w, at = self.w, "mtp.layers.0."
        embedded = self.norm(self.embedding[token], "mtp.pre_fc_norm_embedding")
        x = w["mtp.fc"] @ torch.cat((embedded, self.norm(hidden, "mtp.pre_fc_norm_hidden")))
        y = self.norm(x, f"{at}input_layernorm")
        q, k, v = (w[f"{at}self_attn.{n}_proj"] @ y for n in "qkv")
        self.keys.append(self.turned(k, f"{at}self_attn.k_norm", position))
        self.values.append(v.view(-1, CONFIG["head_dim"]))
        said = []
        for head, query in enumerate(self.turned(q, f"{at}self_attn.q_norm", position)):
            of = head * CONFIG["num_key_value_heads"] // CONFIG["num_attention_heads"]
            keys, values = (torch.stack([each[of] for each in kept]) for kept in (self.keys, self.values))
            said.append((keys @ query / CONFIG["head_dim"] ** 0.5).softmax(0) @ values)
        x = x + w[f"{at}self_attn.o_proj"] @ torch.cat(said)
        y = self.norm(x, f"{at}post_attention_layernorm")
        gate = w[f"{at}mlp.gate_proj"] @ y
        x = x + w[f"{at}mlp.down_proj"] @ (gate * gate.sigmoid() * (w[f"{at}mlp.up_proj"] @ y))
        return self.norm(x, "mtp.norm")


@pytest.mark.parametrize("known", [1, 2, 9])
def test_all_drafts_of_a_row_at_once_are_those_that_are_served_one_by_one(rows: Rows, known: int) -> None:
    """Known tokens have the demo's own states; a draft has what the head made at the position before it."""
    model = untrained()
    ids = rows.encode("KING: to be, or not to be, that is the question.")[:13]
    with torch.no_grad():
        hidden = model.hidden(torch.tensor([ids[:-1]]))
        trained = [model.logits(g[0]) for g in model.drafts(torch.tensor([ids]), hidden)]
    served, g = Served(model), torch.zeros(0)
    for t in range(known):
        g = served.step(hidden[0, t].double(), ids[t + 1], t)
    for n in range(DRAFTS):
        t = known - 1 + n
        if n:
            g = served.step(g, ids[t + 1], t)
        torch.testing.assert_close(trained[n][t].double(), served.embedding @ g, rtol=1e-3, atol=1e-3)


def test_the_head_learns_and_the_demo_stays_as_it_is(rows: Rows) -> None:
    model, batch = Drafter(FOLDER), rows.batch(1, 64, "cpu")
    optimizers, losses = model.optimizers(2e-2), []
    for _ in range(5):
        losses.append(model.loss(*batch, most=2))
        losses[-1].backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert losses[-1] < losses[0] / 2
    demo = Demo(CONFIG)
    demo.load(FOLDER)
    assert all(torch.equal(model.weights[name], weight) for name, weight in demo.weights.items())


def test_a_saved_head_stands_beside_the_demo(tmp_path: Path) -> None:
    for name in FILES:
        shutil.copy(FOLDER / name, tmp_path)
    before, model = load_file(FOLDER / "model.safetensors"), untrained()
    model.save(tmp_path)
    after = load_file(tmp_path / "model.safetensors")
    head = {name: after.pop(name) for name in [*after] if name.startswith("mtp.")}
    assert {name.removesuffix(".weight") for name in head} == NAMES
    assert all(torch.equal(head[name], weight.bfloat16()) for name, weight in model.head.items())
    base = {name: tensor for name, tensor in before.items() if not name.startswith("mtp.")}
    assert after.keys() == base.keys() and all(torch.equal(after[name], tensor) for name, tensor in base.items())
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == CONFIG | {"num_nextn_predict_layers": 1}


def test_the_bundled_head_is_mostly_right(rows: Rows) -> None:
    """Its first drafts for the right answers of an exam."""
    model, score = Drafter(FOLDER, trained=True), Score()
    for question in exam(CORPUS, 2, seed=5):
        asked = rows.turn(question.messages, question.tools)[0] + [rows.assistant]
        score.add(model, rows.turn([*question.messages, question.right], question.tools)[0], len(asked))
    assert score.right[0] > 0.6 * score.reached[0] > 60
