"""A campaign by hand: what the demo writes under real schemas, and structured streams while their worker is killed.

    python campaigns/structured_campaign.py schemas FILE [--limit N]
    python campaigns/structured_campaign.py kills [--streams 64] [--kills 3]

FILE has JSON lines with a `schema` each, as MaskBench has them. The demo answers under each at temperature 1, and each
answer that has come to its end must be valid, says the package jsonschema. The second command has as many free streams
as structured ones. Their worker is killed again and again; all texts must be those of a server that nobody disturbed,
and structured ones must be what they were to be.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent))

import jsonschema

from engine import LLM, SamplingParams, StructuredOutputsParams
from served import Reader, serving, worker_of

DEMO = str(Path(__file__).parent.parent / "demo")
BATCH = 64
PATTERN = r"([a-f]{3} ){20}end"


def schemas(path: Path, limit: int | None) -> bool:
    """Answer under each schema of a file; returns whether all answers that have ended are valid."""
    lines = [json.loads(line) for line in path.read_text().splitlines()][:limit]
    counts: Counter[str] = Counter()
    with LLM(DEMO, dtype="float32", max_num_seqs=BATCH) as llm:
        accepted = []
        for line in lines:
            structure = StructuredOutputsParams(json=json.dumps(line["schema"]))
            try:
                llm.core.grammars.compile(structure).result()
                accepted.append((line, structure))
            except ValueError:
                counts["schemas refused"] += 1
        room = llm.core.facts["max_model_len"] - 16
        params = [
            SamplingParams(temperature=1.0, seed=i, max_tokens=room, structured_outputs=structure)
            for i, (_, structure) in enumerate(accepted)
        ]
        answers = llm.generate(["JSON: "] * len(accepted), params)
    for (line, _), answer in zip(accepted, answers, strict=True):
        out = answer.outputs[0]
        if answer.error or out.finish_reason != "stop":
            counts[answer.error or "answers that filled the context"] += 1
            continue
        try:
            jsonschema.validate(json.loads(out.text), line["schema"])
            counts["answers valid"] += 1
        except (ValueError, jsonschema.ValidationError) as error:
            counts["answers invalid"] += 1
            print(f"{line['name']}: {str(error).splitlines()[0]}: {out.text[:200]}")
    print(dict(counts))
    return not counts["answers invalid"]


def kills(streams: int, times: int) -> bool:
    """Kill the worker under structured and free streams; returns whether all texts are as without."""
    bodies = [
        {"prompt": f"To be {i}", "max_tokens": 120, "seed": i, "temperature": 1.0, "ignore_eos": True}
        | ({"structured_outputs": {"regex": PATTERN}} if i % 2 else {})
        for i in range(2 * streams)
    ]
    texts = []
    for disturbed in (False, True):
        flags = ("--max-num-seqs", str(2 * streams))
        with tempfile.TemporaryDirectory() as folder, serving(Path(folder), *flags) as server:
            readers = [Reader(server, **body) for body in bodies]
            for _ in range(times if disturbed else 0):
                before = sum(len(reader.text) for reader in readers)
                while sum(len(reader.text) for reader in readers) < before + 20 * streams and any(
                    reader.is_alive() for reader in readers
                ):
                    time.sleep(0.1)
                os.kill(worker_of(server), signal.SIGKILL)
                print(f"killed the worker after {sum(len(reader.text) for reader in readers):,} characters")
            for reader in readers:
                reader.join()
            texts.append([reader.text for reader in readers])
            print(f"{'disturbed' if disturbed else 'alone'}: {server.metric('num_worker_restarts_total'):.0f} restarts")
    same = texts[0] == texts[1]
    valid = sum(re.fullmatch(PATTERN, text) is not None for text in texts[1][1::2])
    print(f"texts as undisturbed: {same}; structured ones valid: {valid} of {streams}")
    return same and valid == streams


def main() -> None:
    """Run the part of the campaign that the command line names; ends with 1 if it failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one, other = commands.add_parser("schemas"), commands.add_parser("kills")
    one.add_argument("file", type=Path)
    one.add_argument("--limit", type=int)
    other.add_argument("--streams", type=int, default=64)
    other.add_argument("--kills", type=int, default=3)
    args = parser.parse_args()
    good = schemas(args.file, args.limit) if args.command == "schemas" else kills(args.streams, args.kills)
    sys.exit(not good)


if __name__ == "__main__":
    main()
