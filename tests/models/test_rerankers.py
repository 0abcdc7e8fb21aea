"""Language models that rerank by the logits of two tokens: as vLLM's overrides say it, and as sentence-transformers."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from config import DEMO
from model_config import ModelConfig
from test_embedders import QWEN3, RAW, make
from text.prompts import QWEN3_INSTRUCTION, QWEN3_PAIR

WORDS = ["No", "the"]  # tokens of the demo's tokenizer, in the place of no and yes
OVERRIDES = {
    "architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": WORDS,
    "is_original_qwen3_reranker": True,
}  # fmt: skip
QUERY = "what is a king"
DOCUMENTS = ["a king", "", " 7 spaces", "\n\na\n", "Two Kings " * 9]


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A Qwen3ForCausalLM of 64 hidden states with the demo's tokenizer."""
    made = shutil.copytree(QWEN3, tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(DEMO, name), made)
    raw, tensors = json.loads((made / "config.json").read_text()), load_file(made / "model.safetensors")
    tensors = {f"model.{name}": x.float() for name, x in tensors.items()}
    if not request.param:
        tensors["lm_head.weight"] = torch.randn(raw["vocab_size"], 64)
    raw |= {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": request.param, "dtype": "float32"}
    (made / "config.json").write_text(json.dumps(raw))
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    return made


def test_a_score_is_the_difference_of_two_logits(folder: Path) -> None:
    """After the model card's template, in which the document alone is cut. Users of vLLM write it themselves."""
    embedder, ranker = make(folder, task="embed"), make(folder, hf_overrides=OVERRIDES)
    assert ranker.core.facts["task"] == "score" and ranker.core.facts["labels"] == ("LABEL_0",)
    texts = [QWEN3_PAIR.format(QWEN3_INSTRUCTION, QUERY, document) for document in DOCUMENTS]
    hidden = torch.tensor([one.outputs.data for one in embedder.encode(texts, RAW, use_tqdm=False)])
    table = load_file(folder / "model.safetensors")
    table = table.get("lm_head.weight", table["model.embed_tokens.weight"])
    no, yes = (table[embedder.tokenizer.encode(word)[0]] for word in WORDS)
    want = torch.stack([hidden @ no, hidden @ yes], 1).softmax(1)[:, 1]
    outputs = ranker.score(QUERY, DOCUMENTS, use_tqdm=False)
    assert [one.prompt_token_ids for one in outputs] == [ranker.tokenizer.encode(text) for text in texts]
    assert (torch.tensor([one.outputs.score for one in outputs]) - want).abs().max() <= 1e-5
    begin, end = QWEN3_PAIR.format(QWEN3_INSTRUCTION, QUERY, "\0").split("\0")
    begin, mark, _ = begin.partition("<Document>: ")
    (one,) = ranker.score(begin, mark + DOCUMENTS[-1] + end, use_tqdm=False)
    assert one.outputs.score == pytest.approx(want[-1].item(), abs=1e-5)
    (one,) = ranker.score(QUERY, "a king", use_tqdm=False, instruction="Say")
    assert one.prompt_token_ids == ranker.tokenizer.encode(QWEN3_PAIR.format("Say", QUERY, "a king"))
    whole, keep = outputs[-1].prompt_token_ids, len(outputs[0].prompt_token_ids) + 3
    (one,) = ranker.score(QUERY, DOCUMENTS[-1], use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": keep})
    tail = len(ranker.tokenizer.encode(end))
    assert one.prompt_token_ids == whole[: keep - tail] + whole[-tail:]
    with pytest.raises(ValueError, match="truncate_prompt_tokens is 9; it must be at least "):
        ranker.score(QUERY, "a", use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": 9})
    with pytest.raises(ValueError, match="instruction is 'Say'; it is for models that score pairs, not embedders"):
        embedder.score(QUERY, "a", use_tqdm=False, instruction="Say")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classifier_from_token": ["No", "unheard"]}, r"is \['No', 'unheard'\]; it must list 2 of tok"),
        ({"classifier_from_token": "No"}, "classifier_from_token is 'No'; it must list 2"),
        ({"architectures": ["CohereForSequenceClassification"], "logit_scale": 0.5, "use_qk_norm": True},
         "is for plain heads; CohereForSequenceClassification changes its logits"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("folder", [True], indirect=True)
def test_tokens_that_cannot_classify(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_folder(str(folder), json.dumps(OVERRIDES | changes))
    method = {"method": "no_post_processing", "is_original_qwen3_reranker": None, "classifier_from_token": ["the"]}
    one = ModelConfig.from_folder(str(folder), json.dumps(OVERRIDES | method))
    assert len(one.labels) == len(one.label_tokens) == 1  # as of bge-reranker-v2-gemma, which has one logit


ASK = """
import json, sys
sys.path.append(sys.argv[1])
from sentence_transformers import CrossEncoder
model = CrossEncoder(sys.argv[2], device="cpu", model_kwargs={"dtype": "float32"})
print(json.dumps([model.predict([pair], prompt=prompt)[0].item() for pair, prompt in json.loads(sys.argv[3])]))
"""
LOOP = "{% for m in messages %}<{{ m.role }}> {{ m.content }}{% endfor %}"
TYPED = (
    "{% for m in messages if m.role == 'system' %}<Instruct>: {{ m.content[0].text }}{% endfor %}\n"
    "<Query>: {{ (messages | selectattr('role', 'eq', 'query') | first).content[0].text }}\n"
    "<Document>: {{ (messages | selectattr('role', 'eq', 'document') | first).content[0].text }}"
    "{% if add_generation_prompt %}<answer>{% endif %}"
)


@pytest.mark.full
@pytest.mark.parametrize(("template", "form"), [(LOOP, "flat"), (TYPED, "structured")], ids=["flat", "structured"])
def test_scores_equal_a_cross_encoder_of_sentence_transformers(folder: Path, template: str, form: str) -> None:
    library = importlib.util.find_spec("sentence_transformers")
    if library is None or library.origin is None:
        pytest.skip("sentence-transformers is not installed")
    kinds = {"": "base.modules.transformer.Transformer", "1_LogitScore": "cross_encoder.modules.logit_score.LogitScore"}
    listed = [{"path": path, "type": f"sentence_transformers.{kind}"} for path, kind in kinds.items()]
    message = {"method": "forward", "method_output_name": "logits", "format": form}
    settings = {
        "transformer_task": "text-generation", "module_output_name": "causal_logits",
        "modality_config": {"text": message | {"format": None}, "message": message},
        "processing_kwargs": {"chat_template": {"add_generation_prompt": form == "structured"}},
    }  # fmt: skip
    for name, content in {
        "modules.json": [{"idx": i, "name": str(i)} | entry for i, entry in enumerate(listed)],
        "sentence_bert_config.json": settings,
        "config_sentence_transformers.json": {"model_type": "CrossEncoder", "activation_fn": "torch.nn.Identity"},
    }.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore" / "config.json").write_text('{"true_token_id": 30, "false_token_id": 7}')
    (folder / "chat_template.jinja").write_text(template)
    pairs = [((QUERY, document), prompt) for document in DOCUMENTS for prompt in (None, "Find it")]
    command = [sys.executable, "-I", "-c", ASK, str(Path(library.origin).parent.parent), str(folder), json.dumps(pairs)]
    asked = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr
    want, llm = json.loads(asked.stdout.splitlines()[-1]), make(folder)
    scores = [llm.score(*pair, use_tqdm=False, instruction=prompt)[0].outputs.score for pair, prompt in pairs]
    assert scores == pytest.approx(want, abs=1e-4)
