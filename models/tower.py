"""The tower of a model that sees: it makes of an image's pixels the embeddings that stand for the image's tokens."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F

from layers import New, Owner, linear
from model_config import ModelConfig
from models.shares import Parts, Shares

EncodeRows = tuple[torch.Tensor, int]  # as `reference.EncodeRows`
# Beside what is used, checkpoints have indices, frequencies, masks, and a norm of what is pooled.
UNUSED = (".position_ids", ".inv_freq", ".mask_token", ".post_layernorm.weight", ".post_layernorm.bias")


class Tower(Owner):
    """A transformer over the patches of an image, and what projects its results. Every rank has all of it.

    Args:
        c: the model's shape; it has `vision`, whose row says how the tower departs from CLIP's.
        new: makes memory for weights, which are never in codes.
        device: where the constants go.
    """

    def __init__(self, c: ModelConfig, ops: ModuleType, new: New, device: str):
        assert c.vision
        self.vision, self.ops, self.new, self.names = c.vision, ops, new, c.vision.row.names
        self.weights: dict[str, torch.Tensor] = {}  # by part; those of a layer begin with its number
        self.targets: dict[str, torch.Tensor] = {}  # what each tensor of a checkpoint fills
        v, row, size = c.vision, c.vision.row, c.vision.hidden_size
        root = f"{self.names['root']}."
        ones = (1,) * row.batched  # InternVL's tensors begin with a batch's dimension
        frames = (row.frames,) * (row.frames > 0)
        self.has_class = "class" in self.names
        self.take("patch", root, ("patch",), size, 3, *frames, v.patch, v.patch)
        self.fill("class", root, ("class",), (*ones, *ones, size))
        self.fill("positions", root, ("positions",), (*ones, v.side**2 + self.has_class, size))
        self.take_norm("pre", root, "pre", size, row.norm)
        self.take_norm("last", root, "last", size, "layer")
        self.fill("newline", "", ("newline",), (c.hidden_size,))
        for i in range(v.layers):
            self.take_layer(f"{i}.", f"{root}{self.names['layer']}.{i}.")
        self.take_projector("", f"{self.names['projector']}.", row.wide_norm, c.hidden_size)
        for i in range(len(v.deep_layers)):
            self.take_projector(f"deep{i}.", f"{self.names['deep']}.{i}.", True, c.hidden_size)
        self.tensors = [*self.weights.values()]  # for those who count attributes
        self.eps = v.eps if row.pooled else row.projector_eps or c.norm_eps
        self.width = c.hidden_size * v.levels  # numbers of a row
        self.mean, self.std = (torch.tensor(numbers, device=device) for numbers in (v.mean, v.std))

    # --- weights ------------------------------------------------------------------------------------------------------

    def fill(self, part: str, place: str, names: tuple[str, ...], shape: tuple[int, ...], ending: str = "") -> None:
        """Make memory for a part, which the tensors of these names fill one after the other, if the family has it."""
        if names[0] in self.names:
            self.weights[part + ending] = weight = self.new(*shape)
            saved = [f"{place}{self.names[name]}{ending}" for name in names]
            self.targets |= zip(saved, weight.chunk(len(names)), strict=True)

    def take(self, part: str, place: str, names: tuple[str, ...], *shape: int, bias: str = "") -> None:
        """Make memory for a product, with a bias if the row says so of its part, or of `bias`."""
        self.fill(part, place, names, shape, ".weight")
        if (bias or part.rpartition(".")[2]) in self.vision.row.biases.split():
            self.fill(part, place, names, shape[:1], ".bias")

    def take_norm(self, part: str, place: str, name: str, size: int, kind: str) -> None:
        """Make memory for a norm. LayerNorms have a bias."""
        for ending in (".weight", ".bias")[: 1 + (kind == "layer")]:
            self.fill(part, place, (name,), (size,), ending)

    def take_layer(self, part: str, place: str) -> None:
        """Make memory for a layer."""
        v, size = self.vision, self.vision.hidden_size
        halves = ("gate", "up") if v.row.gated else ("up",)
        for name, kind in (("norm1", v.row.norm), ("norm2", v.row.norm), ("q_norm", "rms"), ("k_norm", "rms")):
            self.take_norm(part + name, place, name, size, kind)
        self.take(f"{part}qkv", place, ("qkv",) if "qkv" in self.names else ("q", "k", "v"), 3 * size, size)
        self.take(f"{part}o", place, ("o",), size, size)
        self.take(f"{part}up", place, halves, len(halves) * v.mlp_size, size)
        self.take(f"{part}down", place, ("down",), size, v.mlp_size)
        for name in ("scale1", "scale2"):
            self.fill(part + name, place, (name,), (size,))

    def take_projector(self, part: str, place: str, wide: bool, out: int) -> None:
        """Make memory for a projector, whose norm may be a LayerNorm of merged patches (`wide`)."""
        v = self.vision
        size, merged = v.hidden_size, v.hidden_size * v.merge**2
        if v.row.pooled:
            self.weights |= {"norm.weight": self.new(size, dtype=torch.float32), "merge.weight": self.new(out, size)}
            self.targets[f"{place}{self.names['projector_norm']}.weight"] = self.weights["norm.weight"]
            self.targets[f"{place}{self.names['merge']}"] = self.weights["merge.weight"].mT
            return
        norm = (merged, "layer") if wide else (size, v.row.norm)
        self.take_norm(f"{part}norm", place, "projector_norm", *norm)
        self.take(f"{part}merge", place, ("merge",), size if "fc1" in self.names else out, merged)
        inner = merged if v.row.wide_inner else out
        self.take(f"{part}fc1", place, ("fc1",), inner, size if "merge" in self.names else merged, bias="project")
        self.take(f"{part}fc2", place, ("fc2",), out, inner, bias="project")

    def finish(self) -> None:
        if self.vision.row.pooled:
            self.weights["norm.weight"] += 1

    def parts(self, shares: Shares) -> Parts:
        """What fills the weights."""
        return shares.parts({name: (target, "all") for name, target in self.targets.items()})

    def lacks(self, saved: str) -> bool:
        """Whether a tensor of a checkpoint is of the tower, and yet there is no place for it."""
        name, layer = saved.removeprefix("model."), f"{self.names['root']}.{self.names['layer']}."
        number = name.removeprefix(layer).partition(".")[0]
        if name.startswith(layer) and number.isdigit() and int(number) >= self.vision.layers:
            return int(number) >= self.vision.saved_layers  # those between them come after what is projected
        roots = (f"{self.names['root']}.", f"{self.names['projector']}.")
        return name.startswith(roots) and not name.endswith(UNUSED) and not name.startswith(f"{roots[0]}head.")

    # --- an image -----------------------------------------------------------------------------------------------------

    def __call__(self, pixels: torch.Tensor, *lines: int) -> torch.Tensor:
        """The rows [n, hidden * levels] of an image's pixels [tiles, height, width, 3] uint8: each row has embeddings
        for the text's first layer, and for the levels of DeepStack. `lines` is the rest of `Picture.shape`."""
        v, weights, device, tiles = self.vision, self.weights, pixels.device, len(pixels)
        rows, columns = pixels.shape[1] // v.patch, pixels.shape[2] // v.patch
        order, blocks, windows = (torch.from_numpy(x).to(device) for x in patch_order(rows, columns, v.merge, v.window))
        y, x_at = order // columns, order % columns
        pixels = pixels[:, : rows * v.patch, : columns * v.patch]  # as a convolution, which leaves out a rest
        x = self.product(self.patches(pixels)[:, order].flatten(0, 1), "patch").unflatten(0, (tiles, -1))
        if "positions" in weights:
            x = x + self.positions(y, x_at, rows, columns).to(x.dtype)
        if self.has_class:
            first = weights["class"].view(1, 1, -1) + weights["positions"].view(-1, x.shape[-1])[:1]
            x = torch.cat((first.expand(tiles, 1, -1), x), 1)
        count = x.shape[1]
        whole = torch.arange(tiles + 1, dtype=torch.int32, device=device) * count, count
        side = (v.window or max(rows, columns)) * v.merge
        windowed = F.pad(windows.cumsum(0, dtype=torch.int32), (1, 0)), min(side, rows) * min(side, columns)
        x = self.norm(x.flatten(0, 1), "pre", v.eps) if "pre.weight" in weights else x.flatten(0, 1)
        rotation = self.rotation(y, x_at) if v.row.rope else None
        levels = []
        for i in range(v.layers):
            x = self.layer(x, f"{i}.", windowed if v.window and i not in v.full_layers else whole, rotation)
            if i in v.deep_layers:
                levels.append(self.project(x, f"deep{v.deep_layers.index(i)}."))
        x = self.norm(x, "last", v.eps) if "last.weight" in weights else x
        if self.has_class:
            x = x.unflatten(0, (tiles, -1))[:, 1:].flatten(0, 1)
        result = torch.cat((self.project(x, ""), *levels), 1)
        if v.window:
            result = torch.empty_like(result).index_copy_(0, blocks, result)
        return self.lined(result, lines) if "newline" in weights else result

    def patches(self, pixels: torch.Tensor) -> torch.Tensor:
        """The normalised patches [tiles, n, numbers] of an image, in the order of the convolution's weights."""
        v = self.vision
        x = ((pixels.double() * v.scale).float() - self.mean) / self.std
        x = x.to(self.weights["patch.weight"].dtype).unflatten(2, (-1, v.patch)).unflatten(1, (-1, v.patch))
        x = x.permute(0, 1, 3, 5, 2, 4).flatten(1, 2)  # [tiles, n, 3, patch, patch]
        return (x[:, :, :, None].expand(-1, -1, -1, v.row.frames, -1, -1) if v.row.frames else x).flatten(2)

    def positions(self, y: torch.Tensor, x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """The learned positions [n, hidden] of patches at y, x [n] of a grid."""
        table, side = self.weights["positions"].flatten(0, -2)[self.has_class :], self.vision.side
        if self.vision.row.positions == "nearest":
            y_at, x_at = (nearest(size, side).to(y.device)[at] for size, at in ((rows, y), (columns, x)))
            return table[y_at * side + x_at]
        grid = table.float().T.reshape(1, -1, side, side)  # an image of this very size keeps the numbers as they are
        return F.interpolate(grid, (rows, columns), mode="bilinear", align_corners=True)[0, :, y, x].T

    def rotation(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Cosines and sines [n, 2, head_dim] float32 of patches at y, x [n]: half of a head's pairs turn by each."""
        v = self.vision
        dim = v.hidden_size // v.heads
        powers = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
        of_row, of_column = powers[0::2], powers[1::2] if v.row.rope == "turns" else powers[0::2]
        angles = [at[:, None] * (1.0 / v.theta**of).to(y.device) for at, of in ((y, of_row), (x, of_column))]
        angle = torch.cat(angles * 2, 1)
        cos, sin = angle.cos(), angle.sin()
        sin[:, : dim // 2].neg_()
        return torch.stack((cos, sin), 1)

    def layer(self, x: torch.Tensor, part: str, rows: EncodeRows, rotation: torch.Tensor | None) -> torch.Tensor:
        """A layer, of x [T, hidden], whose tokens see those of their own row."""
        v, weights = self.vision, self.weights
        y = self.product(self.attend(self.norm(x, f"{part}norm1", v.eps), part, rows, rotation), f"{part}o")
        x = x + (y * weights[f"{part}scale1"] if f"{part}scale1" in weights else y)
        y = self.product(self.norm(x, f"{part}norm2", v.eps), f"{part}up")
        y = self.ops.act_mul(y, v.activation) if v.row.gated else self.act(y, v.activation)
        y = self.product(y, f"{part}down")
        return x + (y * weights[f"{part}scale2"] if f"{part}scale2" in weights else y)

    def attend(self, x: torch.Tensor, part: str, rows: EncodeRows, rotation: torch.Tensor | None) -> torch.Tensor:
        """Attention's results [T, hidden] for x [T, hidden]."""
        heads, qkv = self.vision.heads, self.product(x, f"{part}qkv")
        dim, tokens = self.vision.hidden_size // heads, len(x)
        if f"{part}q_norm.weight" in self.weights:
            q, k, v = (chunk.contiguous() for chunk in qkv.chunk(3, 1))
            qkv = torch.cat((self.norm(q, f"{part}q_norm", 1e-6), self.norm(k, f"{part}k_norm", 1e-6), v), 1)
        q, k, v = qkv.view(tokens, 3, heads, dim).unbind(1)
        if rotation is not None:  # the kernel that stores in pages stores here, in pages of one token
            kv, places = qkv.new_empty(tokens, 2, heads, 1, dim), torch.arange(tokens, device=x.device)
            q = self.ops.qk_norm_rope_store(qkv, None, None, 1.0, rotation, places, kv)
            k, v = kv[:, :, :, 0].unbind(1)
        return self.ops.attention_encode(q, k, v, rows, dim**-0.5, 0, None).flatten(1)

    def project(self, x: torch.Tensor, part: str) -> torch.Tensor:
        """Rows [n, hidden of the text] of the patches x [T, hidden], of which those that are merged lie together."""
        v, norm = self.vision, self.weights.get(f"{part}norm.weight")
        if v.row.pooled:
            return self.product(self.norm(x.unflatten(0, (-1, v.merge**2)).mean(1), "norm", self.eps), "merge")
        if norm is not None and len(norm) == x.shape[1]:
            x, norm = self.norm(x, f"{part}norm", self.eps), None
        x = x.unflatten(0, (-1, v.merge**2))
        x = (x.mT if v.row.by_channel else x).flatten(1)
        x = x if norm is None else self.norm(x, f"{part}norm", self.eps)
        x = self.product(x, f"{part}merge") if f"{part}merge.weight" in self.weights else x
        if "fc1" not in self.names:
            return x
        return self.product(self.act(self.product(x, f"{part}fc1"), v.projector_activation), f"{part}fc2")

    def lined(self, rows: torch.Tensor, lines: tuple[int, ...]) -> torch.Tensor:
        """The rows [n, hidden] of the first tile; and those of the others as lines without padding, each with a newline
        after it. Without `lines`, see `LlavaOnevision` in vision/processors.py, one newline is at the end."""
        newline, side = self.weights["newline"], self.vision.side
        if not lines:
            return torch.cat((rows, newline[None]))
        tiles_across, top, left, height, width = lines
        x = rows[side**2 :].view(-1, tiles_across, side, side, len(newline)).permute(4, 0, 2, 1, 3)
        x = x.flatten(3).flatten(1, 2)  # [hidden, lines, rows of a line]
        x = x[:, top : x.shape[1] - top, left : x.shape[2] - left]
        if x.shape[1:] != (height, width):
            x = F.interpolate(x[None], (height, width), mode="bilinear")[0]
        x = torch.cat((x, newline[:, None, None].expand(-1, height, 1)), 2)
        return torch.cat((rows[: side**2], x.flatten(1).T))

    def product(self, x: torch.Tensor, part: str) -> torch.Tensor:
        """x W^T + bias."""
        return linear(x, self.weights[f"{part}.weight"].flatten(1), self.weights.get(f"{part}.bias"))

    def norm(self, x: torch.Tensor, part: str, eps: float) -> torch.Tensor:
        """LayerNorm where there is a bias, else RMSNorm."""
        weight, bias = self.weights[f"{part}.weight"], self.weights.get(f"{part}.bias")
        return self.ops.rms_norm(x, weight, eps) if bias is None else self.ops.layer_norm(x, weight, bias, eps)

    def act(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """Apply an activation of `reference.act`, or quick_gelu(x) = x sigmoid(1.702 x), as CLIP has it."""
        return x * (1.702 * x).sigmoid() if activation == "quick_gelu" else self.ops.act(x, activation)


def nearest(size: int, side: int) -> torch.Tensor:
    """For each of `size` places along an axis, the nearest row [size] of a table that has `side` of them.

    In float32, which says on which side of a border a place lies, as in transformers.
    """
    borders = torch.arange(1 / side, 1.0, 1 / side, device="cpu")
    shares = torch.arange(size, device="cpu").float() * (1.0 / torch.tensor(size, device="cpu"))
    return torch.bucketize(shares.clamp(max=1 - 1e-6), borders, right=True)


def patch_order(rows: int, columns: int, merge: int, window: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The order in which a tower takes the patches of a grid: those that are merged lie together, and so do windows.

    Args:
        merge: patches along a side that become one row.
        window: rows along a side of a window; 0: there is one window.

    Returns:
        the patches' indices [rows * columns], where row i of the results belongs among all [rows * columns / merge^2],
        and how many patches each window has.
    """
    grid = np.arange(rows * columns).reshape(rows // merge, merge, columns // merge, merge)
    blocks = grid.transpose(0, 2, 1, 3).reshape(-1, merge * merge)
    window = window or max(rows, columns)
    y, x = np.divmod(np.arange(len(blocks)), columns // merge)
    place = y // window * -(-columns // merge // window) + x // window
    order = np.argsort(place, kind="stable")
    return blocks[order].ravel(), order, np.bincount(place) * merge * merge
