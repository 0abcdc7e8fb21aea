"""Divides the tensors of a checkpoint among ranks, and checks that a model can be divided.

One word for each weight says how the ranks divide it; see `Shares.share`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from model_config import ModelConfig
from parallel import Group


class TensorPiece(NamedTuple):
    """A part of a checkpoint's tensor, and where it goes."""

    target: torch.Tensor  # the part of our weights that is filled
    at: tuple[slice | int, ...]  # which part of the tensor it is, seen in the shape `TensorPart.view`


class TensorPart(NamedTuple):
    """The pieces of a checkpoint's tensor that a rank takes."""

    shape: tuple[int, ...]  # of the whole tensor
    pieces: tuple[TensorPiece, ...]
    view: tuple[int, ...] = ()  # the shape in which the pieces are found; () is its own
    transposed: bool = False  # its last two dimensions change places before that
    instead_of: tuple[str, ...] = ()  # names of other tensors that are not needed where this one is there
    optional: bool = False  # whether checkpoints may lack it; the targets are then 1

    @property
    def needed(self) -> bool:
        """Whether a checkpoint must have it, unless it has one that stands for it."""
        return not (self.instead_of or self.optional)


Parts = dict[str, TensorPart]  # by names of tensors


class Shares:
    """The shares of one rank of a `group`, which holds `vocab_size` rows of the tables together."""

    def __init__(self, vocab_size: int, group: Group):
        self.vocab_size, self.group = vocab_size, group

    def share(self, word: str, n: int, copies: int = 1) -> tuple[int, int, int]:
        """The whole length of a dimension, and where the share of this rank begins and ends, which holds `n` of it.

        Each share of what is divided by "kv" is held by `copies` neighbouring ranks.

        A "row" weight multiplies just what the "col" weight before it gave on the same rank. So sums over ranks are
        only needed after "row" weights and after the embedding (Megatron-LM, Shoeybi et al., 2019).
        """
        rank, size = self.group.rank, self.group.size
        length, begin = {
            "all": (n, 0),
            "first": (n, n * (rank > 0)),  # on rank 0 alone, because a sum over ranks follows
            "col": (n * size, n * rank),  # outputs, by whole heads
            "row": (n * size, n * rank),  # inputs
            "kv": (n * size // copies, n * (rank // copies)),  # as "col"
            "vocab": (self.vocab_size, n * rank),
        }[word]
        return length, min(begin, length), min(begin + n, length)

    def part(
        self,
        targets: Sequence[torch.Tensor],
        words: Sequence[str],
        copies: int = 1,
        same: bool = False,
        transposed: bool = False,
    ) -> TensorPart:
        """This rank's pieces of a tensor that fills some weights, one after the other along its outputs.

        Args:
            words: how the ranks divide each; see `share`, also for `copies`.
            same: each takes the same part.
            transposed: the tensor is stored as [inputs, outputs].
        """
        pieces, offset, shape = [], 0, list(targets[0].shape)
        for target, word in zip(targets, words, strict=True):
            dim = 1 if word == "row" else 0
            length, begin, end = self.share(word, target.shape[dim], copies)
            offset = 0 if same else offset
            index: list[slice | int] = [slice(None)] * target.ndim
            index[dim] = slice(offset + begin, offset + end)
            pieces.append(TensorPiece(target.narrow(dim, 0, end - begin), tuple(index)))
            offset += length
            shape[dim] = offset
        if transposed:
            shape.reverse()
        return TensorPart(tuple(shape), tuple(pieces), transposed=transposed)

    def parts(self, weights: Mapping[str, tuple[object, str]]) -> Parts:
        """`part` of each weight that is there, by the name of its tensor and with its word."""
        tensors = {name: (weight, word) for name, (weight, word) in weights.items() if isinstance(weight, torch.Tensor)}
        return {name: self.part((weight,), (word,)) for name, (weight, word) in tensors.items()}

    def by_heads(
        self, targets: Sequence[torch.Tensor], words: Sequence[str], heads: int, copies: int = 1
    ) -> TensorPart:
        """`part` of a tensor [all heads, rows of the first target, rows of the second, .., inputs], where this rank
        has so many `heads`. Ranks that hold the same head divide its "col" rows."""
        rest = targets[0].shape[1:]
        length, begin, end = self.share("kv", heads, copies)
        pieces, offset = [], 0
        for target, word in zip(targets, words, strict=True):
            rows, parts = len(target) // heads, copies if word == "col" else 1
            first = offset + rows * (self.group.rank % parts)
            pieces.append(TensorPiece(target.view(heads, rows, *rest), (slice(begin, end), slice(first, first + rows))))
            offset += rows * parts
        return TensorPart((length * offset, *rest), tuple(pieces), (length, offset, *rest))

    def stacked(
        self, target: torch.Tensor, first: int, total: int, words: Sequence[str], transposed: bool, interleaved: bool
    ) -> TensorPart:
        """`part` of a tensor for all experts that fills [experts of this rank, outputs, inputs].

        Args:
            first: this rank's first expert, of `total`.
            words: of the equal parts of its outputs: gate and up, or one.
            interleaved: the rows of gate and up alternate.
        """
        parts, halves, pieces = len(words), target.chunk(len(words), dim=1), []
        dim = 1 if words[0] == "row" else 0  # of an expert's own tensor
        length, begin, end = self.share(words[0], halves[0].shape[dim + 1])
        for e in range(len(target)):
            for j, half in enumerate(halves):
                index: list[slice | int] = [first + e, *[slice(None)] * (half.ndim - 1)]
                alternating = slice(parts * begin + j, parts * (end - 1) + j + 1, parts)
                index[dim + 1] = alternating if interleaved else slice(j * length + begin, j * length + end)
                pieces.append(TensorPiece(half[e].narrow(dim, 0, end - begin), tuple(index)))
        shape = [total, *target.shape[1:]]
        shape[dim + 1] = length * parts
        if transposed:
            shape[1:] = shape[:0:-1]
        return TensorPart(tuple(shape), tuple(pieces), transposed=transposed)


def is_absent(target: torch.Tensor) -> bool:
    """Whether a weight is a mere shape because only another stage has it."""
    return target.is_meta and not any(target.stride())


def check_division(config: ModelConfig, group: Group) -> None:
    """Check that the ranks of a group can each hold a share of every weight. A ValueError names what cannot be
    divided."""
    size, e, ranks = group.size, config.experts, group.experts
    if ranks and not e:
        raise ValueError(f"enable_expert_parallel is True; {config.architecture} has no experts, so it must be False")
    if ranks and e and e.count < ranks.size * ranks.engines:
        raise ValueError(
            f"tensor_parallel_size is {size}, and there are {ranks.engines} engines; with enable_expert_parallel there "
            f"may be no more ranks in all than the model has experts, {e.count}"
        )
    counts = [("num_attention_heads", config.num_heads)]
    if config.delta:
        counts.append(("linear_num_key_heads", config.delta.key_heads))
    if not all(config.expert_layers) or (config.row.routing and config.row.routing.beside):
        counts += [("intermediate_size", width) for width in dict.fromkeys(config.mlp_sizes)]
    if e:
        counts += [("experts' intermediate size", e.size)] * (group.experts is None)
        counts.append(("shared expert's intermediate size", e.shared_size))
    for name, count in counts:
        if count % size:
            raise ValueError(f"tensor_parallel_size is {size}; it must divide the model's {name}, {count}")
    for count, _ in config.kv_shapes:
        if count % size and size % count:
            raise ValueError(
                f"tensor_parallel_size is {size}; it must divide the model's num_key_value_heads, {count}, or be a "
                "multiple of it"
            )
