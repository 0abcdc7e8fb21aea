"""Images in the scheduler: when towers run, where chunks are cut, what the prefix cache tells apart."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from config import EngineConfig
from observe.journal import Journal
from plan import Picture, Span, StepResult
from replay import replay
from sampling_params import SamplingParams
from scheduler import Scheduler
from scheduling.vision import ImageRows, block_marks
from sequence import SequenceGroup

EOS = 999
IMAGE = 7  # the placeholder token


def scheduler_of(image_rows: int = 24, **options) -> Scheduler:
    options = {
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "num_gpu_blocks_override": 200,
    } | options
    config = EngineConfig(model="none", **options)
    return Scheduler(config, options["num_gpu_blocks_override"], 400, 1000, [EOS], image_rows=image_rows)


def group_of(name: str, parts: list[int | tuple[bytes, int]], seeing: str = "", **params) -> SequenceGroup:
    """A request whose prompt has so many tokens of text, and images (digest, rows) between them.

    Tokens of each image, or of the prompt, may be `seeing` one another.
    """
    prompt, pictures = [], []
    for part in parts:
        if isinstance(part, int):
            prompt += [1 + i % 5 for i in range(part)]
        else:
            digest, rows = part
            run = (len(prompt), len(prompt) + rows) if seeing == "image" else (0, 0)
            pictures.append(Picture(digest, b"", (1, 1, 1), rows, [Span(len(prompt), rows, 0)], run))
            prompt += [IMAGE] * rows
    for picture in pictures if seeing == "prompt" else ():
        picture.seeing = 0, len(prompt)
    params = {"max_tokens": 3, "temperature": 0.0} | params
    return SequenceGroup(name, prompt, SamplingParams(**params), pictures=pictures)


class Device:
    """Does what workers do with images: a token of an image must never be computed without its rows."""

    def __init__(self, scheduler: Scheduler, journal: Journal | None = None):
        self.scheduler, self.journal, self.rows, self.towers = scheduler, journal, {}, []
        self.seen: dict[str, list[int]] = {}  # per request, the positions that were computed, in order

    def run(self, most: int = 200) -> None:
        for _ in range(most):
            if not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError("the requests do not end")

    def step(self) -> None:
        scheduler = self.scheduler
        plan = scheduler.schedule()
        flight = scheduler.in_flight[-1]
        assert plan.rows, "a step without rows"
        vision = plan.vision
        if vision:
            if vision.drop_all:
                self.rows.clear()
            for digest in vision.drop:
                self.rows.pop(digest, None)
            for picture in vision.compute:
                self.towers.append(picture.digest)
                self.rows[picture.digest] = picture.num_rows
            assert sum(self.rows.values()) <= scheduler.images.most_rows
        told = {row[0]: row for row in vision.rows} if vision else {}
        tokens = []
        for i, (seq, (_, count)) in enumerate(zip(flight.seqs, plan.rows, strict=True)):
            end = seq.num_computed if seq.batch is None else seq.num_known - 1
            begin = end - count
            spans = [(picture, span) for picture in seq.group.pictures for span in picture.spans]
            if spans and begin < max(span.begin + span.count for _, span in spans):
                assert told[i][1] == begin
                for picture, span in spans:
                    if span.begin < end and span.begin + span.count > begin:
                        assert picture.digest in self.rows, "rows of an image are missing"
            else:
                assert i not in told
            runs = [picture.seeing for picture in seq.group.pictures]
            assert not any(low < end < high for low, high in runs), "a row ends among tokens that see one another"
            runs = [(max(low - begin, 0), high - begin) for low, high in runs if begin < high <= end]
            assert runs == (vision.seeing.get(i, []) if vision else [])
            tokens.append(5 if end >= len(seq.delivered) else -1)
        result = StepResult(plan.step, tokens)
        if self.journal:
            self.journal.planned(plan)
            self.journal.landed(result)
        scheduler.update(plan, result)


def test_a_chunk_ends_before_an_image_that_waits_for_its_tower() -> None:
    scheduler = scheduler_of(image_rows=12, max_num_batched_tokens=64)
    scheduler.add(group_of("a", [3, (b"x" * 16, 10), 2, (b"y" * 16, 8), 4]))
    device = Device(scheduler)
    device.step()  # the second image has no room beside the first one
    assert device.towers == [b"x" * 16]
    assert scheduler.running[0].num_computed == 15
    device.step()
    assert device.towers == [b"x" * 16, b"y" * 16] and set(device.rows) == {b"y" * 16}
    device.run()


@pytest.mark.parametrize("seeing", ["", "image", "prompt"])
def test_a_journal_with_images_replays(tmp_path: Path, seeing: str) -> None:
    scheduler, path = scheduler_of(image_rows=12), tmp_path / "journal"
    sizes = {"num_blocks": 200, "max_model_len": 400, "vocab_size": 1000, "eos_token_ids": [EOS], "image_rows": 12}
    device = Device(scheduler, journal := Journal(str(path), sizes, scheduler))
    for i in range(6):
        group = group_of(f"r{i}", [i % 3, (bytes([i % 4]) * 16, 5), 2], seeing)
        scheduler.add(group)
        journal.added(group)
    device.run()
    lines = path.read_text().splitlines()
    assert replay(lines).step == scheduler.step and len(device.towers) > 3
    assert [digest for line in lines[1::2] for digest in json.loads(line)["towers"]] == [d.hex() for d in device.towers]


def test_requests_share_rows_and_the_latest_are_kept() -> None:
    scheduler = scheduler_of(enable_prefix_caching=False)
    for i in range(4):
        scheduler.add(group_of(f"r{i}", [i, (b"x" * 16, 9), 3]))
    device = Device(scheduler)
    device.run()
    assert device.towers == [b"x" * 16]
    for name in (b"y", b"z", b"x"):
        scheduler.add(group_of(name.decode(), [(name * 16, 9)]))
        device.run()
    assert device.towers == [b"x" * 16, b"y" * 16, b"z" * 16, b"x" * 16]


def test_a_chunk_may_end_inside_of_an_image_and_an_image_may_be_cut_into_spans() -> None:
    scheduler = scheduler_of(image_rows=40, max_num_batched_tokens=16)
    group = group_of("a", [2, (b"x" * 16, 38), 1])
    group.pictures[0].spans[:] = [Span(2, 10, 0), Span(13, 27, 10)]
    scheduler.add(group)
    device = Device(scheduler)
    device.run()
    assert device.towers == [b"x" * 16]


def test_the_prefix_cache_tells_images_apart() -> None:
    scheduler = scheduler_of(image_rows=64)
    device = Device(scheduler)
    for i, digest in enumerate((b"x", b"x", b"y")):
        group = group_of(f"r{i}", [8, (digest * 16, 16), 9])
        scheduler.add(group)
        device.run()
        assert group.num_cached == (0, 32, 8)[i]
    assert device.towers == [b"x" * 16, b"y" * 16]
    assert block_marks([Picture(b"d", b"", (1, 1, 1), 5, [Span(3, 2, 0), Span(6, 3, 2)])], 4) == {
        0: b"d", 1: b"dd", 2: b"d",
    }  # fmt: skip


def test_rows_are_made_again_after_a_failure_and_a_reset() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=8)
    scheduler.add(group_of("a", [1, (b"x" * 16, 20), 2]))
    device = Device(scheduler)
    device.step()
    scheduler.start_over(lost=True)
    device.rows.clear()
    device.run()
    assert device.towers == [b"x" * 16] * 2
    scheduler.images.forget()
    scheduler.space.reset_prefix_cache()
    scheduler.add(group_of("b", [1, (b"x" * 16, 20), 2]))
    device.run()
    assert device.towers == [b"x" * 16] * 3


def test_an_image_that_is_too_large_is_refused() -> None:
    scheduler = scheduler_of(image_rows=9)
    with pytest.raises(ValueError, match="image 1 becomes 10 tokens; an image may have 9"):
        scheduler.add(group_of("a", [1, (b"x" * 16, 9), (b"y" * 16, 10)]))
    with pytest.raises(ValueError, match="batch_invariant takes no images on a CPU"):
        ImageRows(0).settle(group_of("a", [(b"x" * 16, 1)]), scheduler.config)
    scheduler = scheduler_of(image_rows=24)
    for group in group_of("a", [1, (b"x" * 16, 10)], "image"), group_of("a", [1, (b"x" * 16, 3), 6], "prompt"):
        with pytest.raises(ValueError, match="10 tokens of image 0 see one another; a step has 9 for them"):
            scheduler.add(group)
    with pytest.raises(ValueError, match="the prompt has 9 tokens; with an image it may have 8, a layer's window"):
        ImageRows(24, (0, 8)).settle(group_of("a", [(b"x" * 16, 3), 6], "prompt"), scheduler.config)
    with pytest.raises(ValueError, match="prompt_logprobs is given"):
        scheduler.add(group_of("a", [1, (b"x" * 16, 3)], "prompt", prompt_logprobs=0))


def test_no_chunk_ends_among_tokens_that_see_one_another() -> None:
    scheduler = scheduler_of(image_rows=40, max_num_seqs=4, max_num_batched_tokens=16, scheduling_policy="fair")
    groups = [group_of(str(i), [i, (bytes([i]) * 16, 13), 5, (bytes([9 + i]) * 16, 12), 2], "image") for i in range(4)]
    for i, group in enumerate(groups):
        group.client = str(i % 2)
        scheduler.add(group)
    device = Device(scheduler)
    device.run()
    # The second image of the first one is cached to its middle.
    group = group_of("again", [0, (bytes([0]) * 16, 13), 5, (bytes([9]) * 16, 12), 1], "image")
    scheduler.add(group)
    device.run()
    assert group.num_cached == 28


def test_text_that_sees_what_follows_is_cached_with_all_of_it() -> None:
    scheduler, cached = scheduler_of(image_rows=40, max_num_batched_tokens=64), []
    device = Device(scheduler)
    for digest, end in ((b"x", 9), (b"x", 9), (b"x", 10), (b"y", 9)):
        group = group_of(f"{digest}{len(cached)}", [(digest * 16, 10), end], "prompt", n=2)
        scheduler.add(group)
        device.run()
        cached.append(group.num_cached)
    assert cached == [0, 16, 0, 0]


def test_positions_after_images_are_told_when_a_sequence_enters() -> None:
    scheduler = scheduler_of()
    group = group_of("a", [1, (b"x" * 16, 6), 2])
    group.pictures[0].spans[:] = [Span(1, 6, 0, 2, 3)]
    scheduler.add(group)
    plan = scheduler.schedule()
    assert plan.new[0].shift == -3


@pytest.mark.parametrize("seed", range(6))
def test_many_requests_with_images_end(seed: int) -> None:
    """Few blocks, few rows, samples, beams of one digest: preemptions and evictions; each token has its rows."""
    rng = random.Random(seed)
    tokens = rng.choice((8, 16, 40))
    scheduler = scheduler_of(
        image_rows=rng.choice((12, 16, 30)), num_gpu_blocks_override=rng.choice((30, 60)),
        max_num_batched_tokens=tokens, enable_prefix_caching=rng.random() < 0.5,
    )  # fmt: skip
    device = Device(scheduler)
    for i in range(25):
        parts = [
            rng.randrange(1, 9) if rng.random() < 0.5 else (bytes([rng.randrange(4)]) * 16, rng.randrange(1, 2) + 10)
            for _ in range(rng.randrange(1, 6))
        ]
        seeing = "image" if tokens == 40 else ""
        scheduler.add(group_of(f"r{i}", parts, seeing, n=rng.choice((1, 1, 3)), max_tokens=rng.randrange(1, 9)))
        for _ in range(rng.randrange(4)):
            if scheduler.has_work():
                device.step()
        if rng.random() < 0.1:
            scheduler.start_over(lost=True)
            device.rows.clear()
        if rng.random() < 0.1:
            scheduler.abort(f"r{rng.randrange(i + 1)}")
    device.run(2000)
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
