"""A campaign: few real schemas are refused, and a grammar takes the instances of the others that are valid by them.

    MASKBENCH=FOLDER [DRAWN=600] [SEED=0] python -m pytest -m long -s tests/text/test_real_schemas.py

FOLDER is maskbench/data of https://github.com/guidance-ai/jsonschemabench. Each of its files has a schema, and mostly
instances, of which the package jsonschema has told whether they are valid. A grammar has the properties of an object in
one order, so that an instance may be taken in its own order, or in that of the schema.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from conftest import DEMO
from sampling_params import StructuredOutputsParams
from text.grammar import Grammars
from text.schemas import relaxed
from tokenizer import Tokenizer


def orders_of(schema: Any) -> list[list[str]]:
    """The names of the properties of each object in a schema."""
    parts = [*schema.values()] if isinstance(schema, dict) else schema if isinstance(schema, list) else []
    found = [order for part in parts for order in orders_of(part)]
    named = schema.get("properties") if isinstance(schema, dict) else None
    return [[*named], *found] if isinstance(named, dict) else found


def ordered(value: Any, known: list[list[str]]) -> Any:
    """The same value, each object in the order that has the most of its names."""
    if isinstance(value, list):
        return [ordered(item, known) for item in value]
    if not isinstance(value, dict):
        return value
    best = max(known, key=lambda order: len(value.keys() & {*order}), default=[])
    names = [name for name in best if name in value] + [name for name in value if name not in best]
    return {name: ordered(value[name], known) for name in names}


@pytest.mark.long
@pytest.mark.skipif("MASKBENCH" not in os.environ, reason="MASKBENCH names no folder")
def test_real_schemas_are_held_as_jsonschema_judges_them() -> None:
    counts: Counter[str] = Counter()
    files = sorted(Path(os.environ["MASKBENCH"]).glob("*.json"))
    drawn = random.Random(int(os.environ.get("SEED", 0))).sample(files, int(os.environ.get("DRAWN", 600)))
    grammars, tokenizer = Grammars(str(DEMO), 1024, [1]), Tokenizer(DEMO)
    for path in drawn:
        case = json.loads(path.read_text())
        left: list[str] = []
        try:
            wanted, left = relaxed(StructuredOutputsParams(json=case["schema"]))
            matcher = grammars.compile(wanted).result().matcher
        except ValueError as error:
            counts["refused"] += 1
            print(f"{path.stem} is refused: {str(error)[:200]}")
            continue
        counts.update(f"without {name}" for name in left)
        for instance in case["tests"]:
            data, orders = instance["data"], orders_of(case["schema"])
            texts = {json.dumps(version, ensure_ascii=False) for version in (data, ordered(data, orders))}
            begun = [(text, matcher.deep_copy()) for text in texts]
            taken = any(m.consume_tokens(tokenizer.encode(text, False)) and m.is_accepting() for text, m in begun)
            counts["instances"] += 1
            if taken != instance["valid"] and not (taken and left):
                counts["judged otherwise"] += 1
                print(f"{path.stem} is judged otherwise: valid is {instance['valid']} of {min(texts)[:200]}")
    grammars.close()
    print(len(drawn), "schemas", dict(counts))
    assert counts["refused"] <= 0.05 * len(drawn) and counts["judged otherwise"] <= 0.01 * counts["instances"]
