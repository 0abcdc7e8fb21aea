"""Which images go through the tower in a step, and whose rows the workers keep.

A tower makes rows of embeddings of a whole image, before the step that computes the first of its tokens. The workers
keep rows by the image's digest, so requests share them, and a chunk may end inside of an image. When there is no room
for more, the rows that were used least recently go. Then a sequence that still needs them has them made again.

In some families the tokens of an image, or all of a prompt with one, see one another (`Picture.seeing`). A chunk never
ends among these, because each layer needs the keys and values of all. It may begin among them where the first ones are
cached: the hash of their blocks says what they saw.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence as Items
from hashlib import blake2b

from config import EngineConfig
from plan import Picture, StepPlan, VisionPlan
from sequence import Flight, Sequence, SequenceGroup


def sees_text(picture: Picture) -> bool:
    """Whether text is among the tokens that see one another."""
    begin, end = picture.seeing
    return end - begin > picture.num_rows


def block_marks(pictures: Items[Picture], size: int, prompt: Items[int] = ()) -> dict[int, bytes]:
    """What the hash of each block of `size` tokens takes in beside these: the digests of the images in it.

    Where text of the `prompt` sees what follows, the hash of its first block, and so of all, takes in all of it.
    """
    marks: dict[int, bytes] = {}
    for picture in pictures:
        for span in picture.spans:
            for block in range(span.begin // size, (span.begin + span.count - 1) // size + 1):
                marks[block] = marks.get(block, b"") + picture.digest
        if sees_text(picture):
            begin, end = picture.seeing
            seen = array("q", prompt[begin:end]).tobytes() + picture.digest
            marks[begin // size] = marks.get(begin // size, b"") + blake2b(seen, digest_size=16).digest()
    return marks


def ends_outside(pictures: Items[Picture], begin: int, count: int) -> int:
    """Cut a row of `count` tokens from `begin` on before those that see one another and would not all be in it."""
    for picture in pictures:
        low, high = picture.seeing
        if low < begin + count < high:
            count = max(0, low - begin)
    return count


class ImageRows:
    """The rows that the workers keep, and what of them a plan changes.

    Args:
        most_rows: that the workers have room for, those that a step reads or makes among them; 0: there is no tower.
        windows: see `Scheduler`. Text that sees what follows must not be longer, for then it sees all before it, too.
    """

    def __init__(self, most_rows: int, windows: Items[int] = ()):
        self.most_rows, self.windows = most_rows, windows
        self.kept: OrderedDict[bytes, int] = OrderedDict()  # rows of each image; the one least recently used is first
        self.used: set[bytes] = set()  # by this step
        self.plan = VisionPlan()

    def settle(self, group: SequenceGroup, config: EngineConfig) -> None:
        """Mark the blocks with images; a ValueError if no step can ever have all that belongs to an image."""
        group.marks = block_marks(group.pictures, config.block_size, group.prompt)
        most = config.token_budget - config.max_num_seqs + 1  # in each step, whatever else runs
        if group.pictures and not self.most_rows:
            raise ValueError("batch_invariant takes no images on a CPU if their tokens see one another")
        for i, picture in enumerate(group.pictures):
            if picture.num_rows > self.most_rows:
                raise ValueError(f"image {i} becomes {picture.num_rows} tokens; an image may have {self.most_rows}")
            if (count := picture.seeing[1] - picture.seeing[0]) > most:
                room = f"{most} for them (max_num_batched_tokens less one for each other of max_num_seqs)"
                raise ValueError(f"{count} tokens of image {i} see one another; a step has {room}")
            if sees_text(picture) and (window := min((w for w in self.windows if w), default=count)) < count:
                raise ValueError(f"the prompt has {count} tokens; with an image it may have {window}, a layer's window")
            if sees_text(picture) and group.params.prompt_logprobs is not None:
                raise ValueError("prompt_logprobs is given; with images this model's text sees what follows it")

    def cut(self, seq: Sequence, count: int) -> int:
        """Cut a row of `count` tokens before the first image whose rows cannot be there in this step.

        The tower makes those of the others. The first tokens may be of such an image; then the row has none.
        """
        begin, pictures = seq.num_computed, seq.group.pictures
        count = ends_outside(pictures, begin, count)
        for picture in pictures:
            inside = [span for span in picture.spans if span.begin < begin + count and span.begin + span.count > begin]
            if inside and not self._provide(picture):
                return ends_outside(pictures, begin, max(0, inside[0].begin - begin))
        return count

    def least(self, seq: Sequence) -> int:
        """The fewest tokens that a sequence's next row may have."""
        runs = (picture.seeing for picture in seq.group.pictures)
        return next((end - seq.num_computed for begin, end in runs if begin <= seq.num_computed < end), 1)

    def _provide(self, picture: Picture) -> bool:
        """Have an image's rows in this step, if there is room for them."""
        digest, rows = picture.digest, picture.num_rows
        if digest not in self.kept:
            in_use = sum(self.kept[other] for other in self.used)
            if in_use + rows > self.most_rows:
                return False
            for other in [other for other in self.kept if other not in self.used]:
                if sum(self.kept.values()) + rows <= self.most_rows:
                    break
                del self.kept[other]
                self.plan.drop.append(other)
            self.kept[digest] = rows
            self.plan.compute.append(picture)
        self.kept.move_to_end(digest)
        self.used.add(digest)
        return True

    def planned(self, flight: Flight) -> None:
        """The plan is made, up to the order of its rows: say which of them have tokens of images, or before some."""
        plan = self.plan
        for i, (seq, count, computed) in enumerate(flight.other_rows, len(flight.decodes.seqs)):
            pictures, begin = seq.group.pictures, computed - count
            spans = [(picture.digest, span) for picture in pictures for span in picture.spans]
            if any(begin < span.begin + span.count for _, span in spans):
                plan.rows.append((i, begin, spans))
            if runs := [picture.seeing for picture in pictures if begin < picture.seeing[1] <= computed]:
                plan.seeing[i] = [(max(low - begin, 0), high - begin) for low, high in runs]
        if plan != VisionPlan():
            flight.plan.vision = plan
        self.plan, self.used = VisionPlan(), set()

    def suspects(self, failed: StepPlan, seqs: list[Sequence]) -> list[Sequence]:
        """Those of `seqs` that may be why a step failed: if it ran a tower, the ones with the tower's images."""
        digests = {picture.digest for picture in failed.vision.compute} if failed.vision else set()
        return [seq for seq in seqs if any(picture.digest in digests for picture in seq.group.pictures)] or seqs

    def forget(self) -> None:
        """Trust no rows any more: the workers may not have them, or have other weights now."""
        self.kept.clear()
        self.plan.drop_all = True
