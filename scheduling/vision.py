"""Which images go through the tower in a step, and whose rows the workers keep.

A tower makes rows of embeddings of a whole image, before the step that computes the first of its tokens. The workers
keep rows by the image's digest, so requests share them, and a chunk may end inside of an image. When there is no room
for more, the rows that were used least recently go. Then a sequence that still needs them has them made again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Items

from plan import Picture, StepPlan, VisionPlan
from sequence import Flight, Sequence, SequenceGroup


def block_marks(pictures: Items[Picture], size: int) -> dict[int, bytes]:
    """What the hash of each block of `size` tokens takes in beside these: the digests of the images in it."""
    marks: dict[int, bytes] = {}
    for picture in pictures:
        for span in picture.spans:
            for block in range(span.begin // size, (span.begin + span.count - 1) // size + 1):
                marks[block] = marks.get(block, b"") + picture.digest
    return marks


class ImageRows:
    """The rows that the workers keep, and what of them a plan changes.

    Args:
        most_rows: that the workers have room for, those that a step reads or makes among them; 0: there is no tower.
    """

    def __init__(self, most_rows: int):
        self.most_rows = most_rows
        self.kept: OrderedDict[bytes, int] = OrderedDict()  # rows of each image; the one least recently used is first
        self.used: set[bytes] = set()  # by this step
        self.plan = VisionPlan()

    def settle(self, group: SequenceGroup, block_size: int) -> None:
        """Mark the blocks with images; a ValueError if the workers can never have all rows of an image."""
        group.marks = block_marks(group.pictures, block_size)
        for i, picture in enumerate(group.pictures):
            if picture.num_rows > self.most_rows:
                raise ValueError(f"image {i} becomes {picture.num_rows} tokens; an image may have {self.most_rows}")

    def cut(self, seq: Sequence, count: int) -> int:
        """Cut a row of `count` tokens before the first image whose rows cannot be there in this step.

        The tower makes those of the others. The first tokens may be of such an image; then the row has none.
        """
        begin = seq.num_computed
        for picture in seq.group.pictures:
            inside = [span for span in picture.spans if span.begin < begin + count and span.begin + span.count > begin]
            if inside and not self._provide(picture):
                return max(0, inside[0].begin - begin)
        return count

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

    def entered(self, seq: Sequence) -> None:
        """A sequence is let in: text after its images may have other positions than its tokens' numbers."""
        if shift := sum(span.shift for picture in seq.group.pictures for span in picture.spans):
            self.plan.shifts[seq.slot] = shift

    def planned(self, flight: Flight) -> None:
        """The plan is made, up to the order of its rows: say which of them have tokens of images, or before some."""
        plan = self.plan
        for i, (seq, count, computed) in enumerate(flight.other_rows, len(flight.decodes.seqs)):
            pictures, begin = seq.group.pictures, computed - count
            if pictures and begin < max(span.begin + span.count for picture in pictures for span in picture.spans):
                spans = [(picture.digest, picture.spans) for picture in pictures]
                plan.rows.append((i, begin, spans))
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
