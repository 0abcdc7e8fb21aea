"""The batch state: what the device knows of the sequences that run, at fixed addresses, and how plans change it."""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from plan import BAD_WORDS, BIAS, MASK, PENALTIES, NewRow, StepPlan, Verified, bit_words
from sampling_params import COLUMNS, MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS

if TYPE_CHECKING:
    from models.logprobs import Scoring

NO_ID = 2**31 - 1
ALIGNMENT = 4  # words: every tensor begins at a multiple of 16 bytes, because kernels are compiled for that
FLOATS = ("params", "penalties", "biases")  # the tensors that hold no integers


class StepShape(NamedTuple):
    """What the host must know about a step to launch it. The device finds all else in the batch state."""

    rows: int  # including padding rows, whose slot is -1
    tokens: int
    num_decodes: int  # this many tokens come first and go through attention_decode: one of a row, and drafts after it
    samples: int  # tokens that are sampled: one of a row, and one after each draft
    max_query_len: int
    adjusted: bool  # whether some slot's logits are adjusted
    adapted: bool = False  # whether some sequence has an adapter
    drafted: int = 0  # the rows with these tokens, if some of them have drafts
    queries: int = 1  # tokens of each row, if all rows have as many drafts as there may be
    proposes: bool = False  # whether drafts are made for later steps


class Writes:
    """Changes of the batch state, gathered on the host: see `reference.apply_writes`."""

    def __init__(self) -> None:
        self.ranges, self.values = array("q"), array("i")  # (at, begin, length) of each write; the words to write

    def add(self, at: int, values: array | np.ndarray) -> None:
        """Write `values`, of 4 bytes each, from word `at` on. No two writes may overlap."""
        begin = len(self.values)
        self.values.frombytes(values.tobytes())
        self.ranges.extend((at, begin, len(self.values) - begin))

    def clear(self) -> None:
        """Forget all writes."""
        del self.ranges[:], self.values[:]


class Processor(Protocol):
    """A class that `EngineConfig.logits_processors` names. It is made once, with the model's config."""

    def __call__(self, logits: torch.Tensor, slots: torch.Tensor, state: BatchState) -> torch.Tensor:
        """The logits [R, V] to sample from, for rows in `slots` [R] int32, -1 for padding; the given ones stay.

        CUDA graphs record this, and a start measures it on meta tensors: no shape may depend on what tensors hold.
        """


class BatchState:
    """What the device knows of each running sequence, one row ("slot") each, and of the rows of a step.

    All tensors but the token counts lie in one, of 4-byte words, so that one copy and one kernel bring all that a plan
    changes (`Writes`). Each has a fixed address, so that one CUDA graph serves every step of its shape.

    A few arrays are on the host. `to_compute` is how many of a slot's known tokens are still to be computed: one while
    it decodes. So the worker knows which rows sample without asking the device. `num_logprobs`, `masked_logprobs` and
    `scores` are for the host alone, and `adjusted` mirrors `adjustments`. `stops_barred` is one more than the draws for
    which min_tokens still bars a slot's stop tokens, or 0. `barred_rows` has what such slots entered with.

    The token counts, 4 bytes for each slot and token of the vocabulary, are there without penalties, too. On a CPU they
    take memory once they are used. What stands in a slot's tokens stays until another sequence enters it.

    Args:
        slots: S, sequences that run at once, and rows of a step.
        max_model_len, max_blocks: tokens of each, and blocks of each of its tables.
        block_size: tokens in a block.
        vocab_size: V.
        device: where the tensors lie.
        kinds: K, kinds of layers. Each kind has a block table for every slot.
        writes: makes a replacement of `Writes` for a CPU, where changes are written at once.
        processors: change logits before `sample`.
        drafts: the most that a sequence may have. A slot has as many more bitmasks: one after each draft.
    """

    # Each annotation below is a tensor in `words`, which `__init__` makes.
    token_ids: torch.Tensor  # [S, max_model_len + 1] int32, all known tokens
    num_known: torch.Tensor  # [S] int32
    num_computed: torch.Tensor  # [S] int32, of the known tokens
    block_tables: torch.Tensor  # [K, S, max_blocks or a little more] int32
    params: torch.Tensor  # [S, P] float32, `COLUMNS` of the sampling parameters; each is an attribute, too
    seeds: torch.Tensor  # [S] int64, no column because float32 would round it
    adjustments: torch.Tensor  # for this and the next four see `reference.Adjust`
    penalties: torch.Tensor
    bias_ids: torch.Tensor
    biases: torch.Tensor
    bitmask: torch.Tensor
    num_prompt: torch.Tensor  # [S] int32, of the known tokens; set only if there are bad words
    bad_words: torch.Tensor  # [S, 128, 16] int32: 64 words in two spellings, see `reference.mask_words`; set only then
    stop_bits: torch.Tensor  # [S, V / 32] int32, bit token % 32 of word token // 32: the token ends the sequence
    adapters: torch.Tensor  # [S] int32, `NewRow.adapter` where it has matrices
    slots: torch.Tensor  # [S] int32, the slot of each of the step's rows; -1 marks a padding row, which changes nothing
    query_starts: torch.Tensor  # [S + 1] int32, where each row's tokens begin
    sample_starts: torch.Tensor  # [S + 1] int32, where the tokens that each row samples begin among all
    # [S * (1 + drafts)] int32, of each token that is sampled: its slot, the index of the token before it in the step,
    # and how many drafts it comes after. Set only if some token of the step has none sampled after it, or is a draft.
    sampling: torch.Tensor
    last: torch.Tensor
    ahead: torch.Tensor
    num_drafts: torch.Tensor  # [S] int32, how many tokens behind the known ones are drafts
    clients: torch.Tensor  # [S] int32, `NewRow.client`
    shifts: torch.Tensor  # [S] int32, added to positions for RoPE, see `NewRow.shift`
    room: torch.Tensor  # [S] int32, tokens that a slot's blocks hold; set only if there may be drafts
    decode_slots: torch.Tensor  # [S * (1 + drafts)] int32, the slot of each decode token; set only if some are drafts

    def __init__(
        self, slots: int, max_model_len: int, max_blocks: int, block_size: int, vocab_size: int, device: str,
        kinds: int = 1, writes: Callable[[torch.Tensor], Writes] | None = None, processors: Sequence[Processor] = (),
        drafts: int = 0,
    ):  # fmt: skip
        self.block_size, self.device, self.processors = block_size, device, processors
        self.most_drafts, most = drafts, slots * (1 + drafts)
        if kinds > 1:  # each kind's tables begin at a multiple of 16 bytes, too
            max_blocks = -(-max_blocks // ALIGNMENT) * ALIGNMENT
        shapes: dict[str, tuple[int, ...]] = {
            "token_ids": (slots, max_model_len + 1), "block_tables": (kinds, slots, max_blocks),
            "params": (slots, len(COLUMNS)), "seeds": (slots, 2), "penalties": (slots, 3),
            "bias_ids": (slots, MAX_LOGIT_BIAS), "biases": (slots, MAX_LOGIT_BIAS),
            "bitmask": (slots, 1 + drafts, -(-vocab_size // 32)), "stop_bits": (slots, -(-vocab_size // 32)),
            "query_starts": (slots + 1,), "bad_words": (slots, 2 * MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS),
            "sample_starts": (slots + 1,), "sampling": (most,), "last": (most,), "ahead": (most,),
            "decode_slots": (most,),
        }  # fmt: skip
        names = [name for name in BatchState.__annotations__ if name not in shapes]
        shapes |= dict.fromkeys(names, (slots,))
        sizes = [-(-math.prod(shape) // ALIGNMENT) * ALIGNMENT for shape in shapes.values()]
        begins = np.cumsum([0, *sizes]).tolist()
        self.words = torch.zeros(begins.pop(), dtype=torch.int32, device=device)
        self.places: dict[str, tuple[int, int]] = {}  # of each tensor: its first word, and words per slot
        for (name, shape), begin in zip(shapes.items(), begins, strict=True):
            self.places[name] = begin, math.prod(shape[2:] if name == "block_tables" else shape[1:])
            part = self.words[begin : begin + math.prod(shape)].view(shape)
            setattr(self, name, part.view(torch.float32) if name in FLOATS else part)
        for name, column in zip(COLUMNS, self.params.unbind(1), strict=True):
            setattr(self, name, column)
        self.seeds = self.words[self.places["seeds"][0] :][: 2 * slots].view(torch.int64)
        self.token_counts = torch.zeros(slots, vocab_size, dtype=torch.int32, device=device)
        self.to_compute, self.num_logprobs, self.adjusted, self.stops_barred = np.zeros((4, slots), dtype=np.int32)
        self.adapted = np.zeros(slots, dtype=np.int32)  # `adapters`, on the host
        self.barred_rows: dict[int, NewRow] = {}
        self.masked_logprobs = np.zeros(slots, dtype=bool)  # see `NewRow`
        self.scores: dict[int, tuple[int, int, int, int]] = {}  # by slot: `NewRow.score`, and its tokens
        self.num_blocks = [[0] * kinds for _ in range(slots)]  # by slot and kind
        self.stops: list[dict[int, int]] = [{} for _ in range(slots)]  # of each slot: words of stop_bits that are not 0
        self.writes = writes(self.words) if writes else Writes()  # for `apply`

    def enter(self, plan: StepPlan) -> None:
        """Let sequences leave, enter and grow. Token counts change now; all else is noted, and `apply` brings it."""
        adjustments = dict.fromkeys(plan.released, 0)
        adapters = {slot: 0 for slot in plan.released if self.adapted[slot]}
        for slot in plan.released:
            self.scores.pop(slot, None)
            self.stops_barred[slot] = 0
            self.barred_rows.pop(slot, None)
        for row in plan.new:
            slot, length = row.slot, len(row.token_ids)
            self.to_compute[slot] = length - row.num_computed
            self.scores.pop(slot, None)  # left over if another rank has refused a step
            if row.score is not None:
                self.scores[slot] = (*row.score, length)
            self.num_logprobs[slot] = row.num_logprobs
            self.masked_logprobs[slot] = row.masked_logprobs
            self.num_blocks[slot] = [0] * len(row.blocks)
            self._write("token_ids", slot, array("i", row.token_ids))
            numbers = {"num_known": length, "num_computed": row.num_computed, "num_drafts": 0, "clients": row.client}
            numbers["shifts"] = row.shift
            for name, number in numbers.items():
                self._write(name, slot, array("i", (number,)))
            self._write("params", slot, array("f", row.sampling))
            self._write("seeds", slot, array("q", (row.seed,)))
            self._grow(slot, row.blocks)
            if row.stops != self.stops[slot]:  # mostly they equal the last row's in this slot
                self.stops[slot] = row.stops
                self._write("stop_bits", slot, self._bits(row.stops))
            adjustments[slot] = self._enter_adjustments(row)
            if row.adapter or self.adapted[slot]:
                adapters[slot] = row.adapter
        for slot, blocks in plan.new_blocks:
            self._grow(slot, blocks)
        if self.most_drafts:
            longest = self.token_ids.shape[1] - 1
            for slot in {*(row.slot for row in plan.new), *(slot for slot, _ in plan.new_blocks)}:
                room = min(longest, self.num_blocks[slot][0] * self.block_size)
                self._write("room", slot, array("i", (room,)))
        for slot, masks in plan.masks:
            self._write("bitmask", slot, np.frombuffer(masks, dtype=np.uint32))
            if drafts := len(masks) // (4 * self.bitmask.shape[2]) - 1:  # the grammar takes no more of them
                self._write("num_drafts", slot, array("i", (drafts,)))
        for slot, bits in adjustments.items():
            self._note(slot, bits)
        for slot, adapter in adapters.items():
            self.adapted[slot] = adapter
            self._write("adapters", slot, array("i", (adapter,)))

    def _note(self, slot: int, bits: int) -> None:
        self.adjusted[slot] = bits
        self._write("adjustments", slot, array("i", (bits,)))

    def _enter_adjustments(self, row: NewRow) -> int:
        """Note what changes the logits of a new row; returns its `adjustments`, see `reference.Adjust`."""
        slot, bias = row.slot, row.logit_bias
        if row.penalties is not None:
            self._write("penalties", slot, array("f", row.penalties))
            ids, num_prompt = to_device(np.array(row.token_ids), self.device), row.num_prompt
            counts = self.token_counts[slot].zero_()
            counts[ids[:num_prompt]] = 1
            counts.index_add_(0, ids[num_prompt:], counts.new_full((len(ids) - num_prompt,), 2))
        if bias is not None:
            ordered = sorted(bias)
            self._write("bias_ids", slot, array("i", ordered + [NO_ID] * (MAX_LOGIT_BIAS - len(bias))))
            self._write("biases", slot, array("f", [bias[token] for token in ordered]))
        self.stops_barred[slot] = row.min_tokens + 1 if row.min_tokens and row.stops else 0
        if self.stops_barred[slot]:  # one more, because `advance` takes one off before each draw
            self.barred_rows[slot] = row
        return PENALTIES * (row.penalties is not None) | BIAS * (bias is not None) | self._enter_mask(row)

    def _enter_mask(self, row: NewRow) -> int:
        """Note which tokens may be drawn in a row's slot from now on; returns the bits MASK and BAD_WORDS as needed."""
        if row.constrained:  # its steps bring their masks
            return MASK
        barred = row.stops if self.stops_barred[row.slot] else {}
        if row.allowed is None and not barred and not row.bad_words:
            return 0
        bits = np.full(self.places["stop_bits"][1], 0xFFFFFFFF, dtype=np.uint32)
        if row.allowed is not None:
            bits = self._bits(row.allowed)
        bits &= ~self._bits(barred) & ~self._bits(bit_words(word[0] for word in row.bad_words if len(word) == 1))
        self._write("bitmask", row.slot, np.tile(bits, self.bitmask.shape[1]))
        # `mask_words` resets a word's last token each step, so words whose last token another rule bars are left out.
        words = [word for word in row.bad_words if len(word) > 1 and int(bits[word[-1] // 32]) >> word[-1] % 32 & 1]
        if not words:
            return MASK
        rows = np.full((2 * MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, dtype=np.int32)
        for i, word in enumerate(words):
            rows[i, -len(word) :] = word
        self._write("bad_words", row.slot, rows)
        self._write("num_prompt", row.slot, array("i", (row.num_prompt,)))
        return MASK | BAD_WORDS

    def _bits(self, words: dict[int, int]) -> np.ndarray:
        """A mask of `bitmask`, or a row of `stop_bits`, from its words that are not 0."""
        row = np.zeros(self.places["stop_bits"][1], dtype=np.uint32)
        row[list(words)] = list(words.values())
        return row

    def _grow(self, slot: int, tables: list[list[int]]) -> None:
        counts, apart = self.num_blocks[slot], self.block_tables.stride(0)
        for kind, blocks in enumerate(tables):
            if blocks:
                self._write("block_tables", slot, array("i", blocks), kind * apart + counts[kind])
                counts[kind] += len(blocks)

    def _write(self, name: str, slot: int, values: array | np.ndarray, begin: int = 0) -> None:
        place, width = self.places[name]
        self.writes.add(place + slot * width + begin, values)

    def enter_rows(self, rows: np.ndarray, samples: np.ndarray, shape: StepShape) -> None:
        """Note the rows of a step, and padding rows up to `shape.rows`.

        Args:
            rows: [B, 3], slot, number of tokens, and how many of these are drafts, of each.
            samples: [B], how many tokens each samples.
            shape: the step's.
        """
        count, drafted = len(rows), shape.drafted
        slots, lengths = np.full(shape.rows, -1, dtype=np.int32), np.full(shape.rows, shape.queries, dtype=np.int32)
        slots[:count], lengths[:count] = rows[:, :2].T
        starts, bounds = np.zeros((2, shape.rows + 1), dtype=np.int32)
        np.cumsum(lengths, out=starts[1:])
        np.cumsum(samples, out=bounds[1 : count + 1])
        bounds[count + 1 :] = bounds[count]
        parts = {"slots": slots, "query_starts": starts, "sample_starts": bounds}
        if 0 < shape.samples < shape.tokens or drafted:
            owner = np.repeat(np.arange(count, dtype=np.int32), samples)
            ahead = np.arange(len(owner), dtype=np.int32) - bounds[owner]
            columns = np.zeros((3, shape.samples), dtype=np.int32)
            columns[0] = -1  # padding
            columns[:, : len(owner)] = slots[owner], starts[owner + 1] - samples[owner] + ahead, ahead
            parts |= zip(("sampling", "last", "ahead"), columns, strict=True)
        if drafted and shape.queries == 1:
            parts["decode_slots"] = np.repeat(slots[:drafted], lengths[:drafted])
        for name, values in parts.items():
            self._write(name, 0, values)

    def apply(self, ops: ModuleType) -> None:
        """Bring all that was noted to the device, by one copy from pinned memory and one kernel."""
        ranges, values = self.writes.ranges, self.writes.values
        if not ranges:
            return
        staged = np.frombuffer(bytearray(ranges.tobytes() + values.tobytes()), dtype=np.int32)
        ops.apply_writes(self.words, to_device(staged, self.device), len(ranges) // 3)
        self.writes.clear()

    def forget(self) -> None:
        """Drop what was noted for a step that has failed. All sequences will enter anew."""
        self.writes.clear()
        self.scores.clear()
        self.stop_bits.zero_()
        self.stops = [{} for _ in self.stops]

    def advance(self, rows: np.ndarray) -> np.ndarray:
        """Count the known tokens of `rows` [B, 3] as computed; returns how many tokens each samples [B].

        A row that has caught up samples one, and one after each of its drafts. When a row has sampled min_tokens times,
        its stop tokens are allowed again.
        """
        slots, counts, drafts = rows.T
        left = self.to_compute[slots] - (counts - drafts)
        assert (left >= 0).all(), "a row ran past its known tokens"
        samples = left == 0
        self.to_compute[slots] = left + samples
        for slot in slots[samples & (self.stops_barred[slots] > 0)].tolist():
            self.stops_barred[slot] -= 1
            if not self.stops_barred[slot]:  # from this draw on
                others = self.adjusted[slot] & ~(MASK | BAD_WORDS)
                self._note(slot, others | self._enter_mask(self.barred_rows.pop(slot)))
        return np.where(samples, 1 + drafts, 0)

    def with_drafts(self, plan: StepPlan) -> StepPlan:
        """A plan with as many drafts as its rows have, instead of the most that they may; for a state on a CPU."""
        drafts = {slot: min(most, int(self.num_drafts[slot])) for slot, most in plan.drafts.items()}
        rows = [(slot, count - plan.drafts.get(slot, 0) + drafts.get(slot, 0)) for slot, count in plan.rows]
        return dataclasses.replace(plan, rows=rows, drafts=drafts)

    def drafts_of(self, slots: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The first drafts of `slots` [R], as many as `counts` [R] says, and then -1: [R, most_drafts] int32."""
        order = torch.arange(self.most_drafts, dtype=torch.int32, device=self.device)
        places = (self.num_known[slots][:, None] + order).clamp(max=self.token_ids.shape[1] - 1)
        drafts = self.token_ids[slots[:, None].long(), places.long()]
        return drafts.masked_fill(order >= counts[:, None], -1)

    def adjust(self, ops: ModuleType) -> Any:
        """The `Adjust` of all slots."""
        return ops.Adjust(self.adjustments, self.penalties, self.token_counts, self.bias_ids, self.biases, self.bitmask)

    def bar(self, logits: torch.Tensor, rows: torch.Tensor, slots: np.ndarray, after: np.ndarray) -> None:
        """Set logits of barred tokens to -inf in those `rows` [R] whose `slots` [R] ask for it (masked_logprobs).

        after: [R], how many drafts each row's token comes after.
        """
        if len(masked := np.flatnonzero(self.masked_logprobs[slots])):
            rows = rows[to_device(masked, self.device)]
            words = self.bitmask[to_device(slots[masked], self.device), to_device(after[masked], self.device)]
            bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=self.device) & 1
            logits[rows] = logits[rows].masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, -math.inf)

    def sample(
        self, ops: ModuleType, logits: torch.Tensor, slots: torch.Tensor, adjust: Any,
        drafts: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The next token [R] of each of `slots` [R], from logits [R, vocab]; `adjust` is this step's.

        drafts: [R, K] int32, what each token comes after, see `reference.sample`; they follow the known `token_ids`.
        """
        for processor in self.processors:
            logits = processor(logits, slots, self)
        if adjust is not None:
            ops.mask_words(slots, self.token_ids, self.num_known, self.num_prompt, self.bad_words, adjust, drafts)
        return ops.sample(logits, slots, self.params, self.seeds, self.num_known, adjust, drafts)

    def update(
        self, ops: ModuleType, slots: torch.Tensor, query_starts: torch.Tensor, sample_starts: torch.Tensor,
        ids: torch.Tensor, adjust: Any = None, drafted: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """Take in what the rows in `slots` [B] have computed and sampled; returns the news of `reference.post_update`.

        Drafts are verified if the step has `drafted` some.
        """
        drafts = (self.num_drafts, self.most_drafts if drafted else 0) if self.most_drafts else ()
        return ops.post_update(
            self.token_ids, self.num_known, self.num_computed, slots, query_starts, sample_starts, ids, self.stop_bits,
            adjust, *drafts,
        )  # fmt: skip


def to_device(array: np.ndarray, device: str) -> torch.Tensor:
    """A copy of a host array on the device. Nobody waits for it: torch keeps the pinned memory until it was read."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.startswith("cuda") else tensor.to(device)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the host's memory, complete once the device has finished the work that it was given before."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


@dataclass(slots=True)
class Rows:
    """A step's rows, as the batch state holds them."""

    planned: list[tuple[int, int]]  # [B] slot and number of tokens of each; see `StepPlan`
    drafts: dict[int, int]  # by slot: how many of its row's tokens are drafts
    shape: StepShape
    sampling: np.ndarray  # [R] the row of each token that is sampled,
    slots: np.ndarray  # and its slot
    with_logprobs: np.ndarray  # [A] which of these tokens want log-probabilities,
    counts: list[int]  # and how many of the likeliest ids each of these wants
    scoring: Scoring | None = None  # known tokens to score; None: none, as in every step of decodes
    eager: bool = False  # no part of the step is a CUDA graph, because it has images

    @property
    def decode(self) -> bool:
        """Whether every row has one token and samples. The next step with these rows finds its inputs on the device."""
        return self.shape.samples == self.shape.tokens

    def verified(self, tokens: list[int], padded: bool) -> dict[int, Verified]:
        """The results of rows with drafts, by their index, from the sampled `tokens` of `reference.post_update`.

        Places without a draft count as drafts if rows are `padded` with them, because they cost as much.
        """
        results: dict[int, Verified] = {}
        for row, token in zip(self.sampling.tolist(), tokens, strict=True):
            if self.planned[row][0] in self.drafts:
                result = results.setdefault(row, Verified(-1, []))
                result.drafts += padded or token != -2
                result.token_ids += [token] if token >= 0 else []
        return results
