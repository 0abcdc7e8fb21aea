"""What structured outputs cost: masks beside a step, and schemas to compile."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from engine import LLM, SamplingParams, StructuredOutputsParams
from made_models import SHAPES
from text.grammar import Grammars
from turns import in_turns, median_ratio, spread

Figures = list[dict[str, Any]]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2},
        "size": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}},
        "note": {"type": "string", "minLength": 2000},  # so that no answer ends before it is cut
    },
    "required": ["name", "tags", "size", "note"],
    "additionalProperties": False,
}


def write_vocabulary(folder: Path, size: int) -> None:
    """Write a byte-level `tokenizer.json` with `size` tokens of up to 12 characters, as they are in text and JSON."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    rng = random.Random(0)
    letters = (
        "eeettaoinshrdlu" + 'cmfwypvbgkqjxzETAOINSHRDLU0123456789"",::{}[].-_/\u0120\u0120\u010a'
    )  # space, newline
    tokens = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    merges, made = [], list(letters)
    while len(tokens) < size - 1:
        first, second = rng.choice(made), rng.choice(letters)
        if len(first) < 12 and first + second not in tokens:
            tokens[first + second] = None
            merges.append((first, second))
            made.append(first + second)
    model = models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges)
    made_up = tokenizers.Tokenizer(model)
    made_up.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made_up.decoder = decoders.ByteLevel()
    made_up.add_special_tokens([tokenizers.AddedToken("<|end|>", special=True)])
    made_up.save(str(folder / "tokenizer.json"))


def mask_figures(shape: str, rows: int, new_tokens: int, repeats: int) -> Figures:
    """Milliseconds of a decode step of `rows` sequences, of free ones and of ones that write JSON, in turns.

    The model has made-up weights and draws at temperature 1. It is one engine, with one more kind of answers in it:
    free ones of which each may draw a listed half of the vocabulary, which a mask of their own says once.

    Args:
        shape: of the model, a name in SHAPES.
        rows: sequences that run at once.
        new_tokens: of each.
        repeats: turns.
    """
    config = SHAPES[shape]
    vocab_size = config["vocab_size"]
    half = tuple(range(0, vocab_size, 2))
    kinds: dict[str, dict[str, Any]] = {
        "free": {"ignore_eos": True}, "half of the tokens": {"ignore_eos": True, "allowed_token_ids": half},
        "JSON": {"structured_outputs": StructuredOutputsParams(json=SCHEMA)},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": vocab_size - 1}))
        write_vocabulary(folder, vocab_size)
        options: dict[str, Any] = {"load_format": "dummy", "enable_prefix_caching": False}
        with LLM(name, max_num_seqs=rows, max_model_len=256, **options) as llm:

            def step_time(fields: dict[str, Any], turn: int) -> float:
                params = [SamplingParams(max_tokens=new_tokens, seed=i, **fields) for i in range(rows)]
                outs = llm.generate([[i + 1] * 16 for i in range(rows)], params, use_tqdm=False)
                assert all(len(out.outputs[0].token_ids) == new_tokens for out in outs)
                begun = max(out.metrics.first_token_time or 0.0 for out in outs)
                ended = max(out.metrics.finished_time or 0.0 for out in outs)
                return 1e3 * (ended - begun) / (new_tokens - 1)

            steps = in_turns({kind: partial(step_time, fields) for kind, fields in kinds.items()}, repeats)
    return [
        {
            "answers": kind, "ms a step": round(statistics.median(times), 2), **spread(times, 2),
            "of free": median_ratio(times, steps["free"]),
        }
        for kind, times in steps.items()
    ]  # fmt: skip


def schema_figures(model: str, file: Path) -> Figures:
    """Compile the schemas of a file, and read with each the instances that are valid by it and those that are not.

    Args:
        model: folder, for its vocabulary.
        file: JSON lines with `name`, `schema` and `tests`, each of which has `data` and `valid`, as MaskBench has them.
    """
    from model_config import ModelConfig

    config = ModelConfig.from_folder(model)
    grammars = Grammars(model, config.vocab_size, config.eos_token_ids)
    grammars.compile(StructuredOutputsParams(choice=("warm",))).result()
    lines, seconds, refused, misread, count = file.read_text().splitlines(), [], 0, 0, 0
    for line in map(json.loads, lines):
        schema, begun = StructuredOutputsParams(json=json.dumps(line["schema"])), time.perf_counter()
        error = (grammar := grammars.compile(schema)).exception()
        seconds.append(time.perf_counter() - begun)
        if error:
            refused += 1
            print(f"{line['name']}: {error}")
            continue
        for test in line["tests"]:
            text, matcher = json.dumps(test["data"], ensure_ascii=False), grammar.result().matcher.deep_copy()
            accepted = matcher.consume_tokens(grammars.tokenizer.tokenize_str(text)) and matcher.is_accepting()
            count += 1
            if accepted != test["valid"]:
                misread += 1
                print(f"{line['name']}: {'valid' if test['valid'] else 'invalid'}, says MaskBench, is {text[:80]}")
    grammars.close()
    seconds.sort()
    p50, p99 = (round(1e3 * seconds[int(len(seconds) * share)], 1) for share in (0.5, 0.99))
    return [{
        "schemas": len(lines), "refused": refused, "instances": count, "wrong": misread, "compile ms p50": p50,
        "p99": p99,
    }]  # fmt: skip
