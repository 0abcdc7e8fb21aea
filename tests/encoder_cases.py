"""The cases of `random_checkpoints` that are encoders."""

from __future__ import annotations

from typing import Any

CLASSIFIER, MASKED = "AutoModelForSequenceClassification", "AutoModelForMaskedLM"


def encoder(config: str, head: str = "AutoModel", **more: Any) -> dict[str, Any]:
    """An encoder with 4 heads of 8. Of those with types of tokens, the last prompts have a second text."""
    fields = {
        "vocab_size": 99, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 48,
        "max_position_embeddings": 210, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 1, **more,
    }  # fmt: skip
    typed = {"seconds": {"7": 20, "8": 1}} if fields.get("type_vocab_size") == 2 else {}
    return {"config": config, "shape": fields, "head": head, **typed}


DISTIL = {"dim": 32, "n_heads": 4, "n_layers": 3, "hidden_dim": 48}
MODERN = {"local_attention": 16, "num_hidden_layers": 4, "cls_token_id": None, "sep_token_id": None}
BOTH = {"num_key_value_heads": 2, "is_causal": False}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": encoder("BertConfig", type_vocab_size=2),
    "bert-masked": encoder("BertConfig", MASKED, type_vocab_size=2),
    "bert-labels": encoder("BertConfig", CLASSIFIER, type_vocab_size=2, num_labels=3),
    "bert-score": encoder("BertConfig", CLASSIFIER, type_vocab_size=2, num_labels=1),
    "roberta": encoder("RobertaConfig", MASKED, type_vocab_size=1, max_position_embeddings=212),
    "xlm-roberta": encoder(
        "XLMRobertaConfig", CLASSIFIER, type_vocab_size=1, num_labels=1, pad_token_id=3, max_position_embeddings=214),
    "camembert": encoder("CamembertConfig", type_vocab_size=1, max_position_embeddings=212),
    "distilbert": encoder("DistilBertConfig", MASKED, **DISTIL),
    "distilbert-labels": encoder(
        "DistilBertConfig", CLASSIFIER, **DISTIL, num_labels=2, sinusoidal_pos_embds=True),
    "mpnet": encoder("MPNetConfig", MASKED, max_position_embeddings=212),
    "mpnet-labels": encoder("MPNetConfig", CLASSIFIER, num_labels=2, max_position_embeddings=212),
    "nomic": encoder("NomicBertConfig", type_vocab_size=2),
    "modernbert": encoder("ModernBertConfig", MASKED, **MODERN),
    "modernbert-labels": encoder(
        "ModernBertConfig", CLASSIFIER, **MODERN, num_labels=3, classifier_pooling="mean", classifier_bias=True,
        norm_bias=True, mlp_bias=True, attention_bias=True),
    "gte": encoder("GteConfig", type_vocab_size=0),
    "gte-score": encoder("GteConfig", CLASSIFIER, type_vocab_size=2, num_labels=1),
    "embedding-gemma": encoder(
        "Gemma3TextConfig", num_key_value_heads=2, head_dim=8, sliding_window=16, num_hidden_layers=6,
        use_bidirectional_attention=True),
    "qwen2-both": encoder("Qwen2Config", **BOTH),
    "qwen3-both-labels": encoder("Qwen3Config", CLASSIFIER, **BOTH, head_dim=8, num_labels=2),
    "llama-both": encoder("LlamaConfig", **BOTH),
    "mistral-both": encoder("MistralConfig", **BOTH, sliding_window=9),
}  # fmt: skip
