"""The rows of encoders: families whose tokens see the whole prompt, and that make vectors and labels of it.

Standard library only, as models/families.py.
"""

from __future__ import annotations

from models.family_row import Family, sized

BERT = Family(
    encoder=True, post_norm=True, pooling="cls", label_head="pooler",
    norm="layer", norm_bias=True, qkv_bias=True, o_bias=True, mlp_bias=True, gated=False,
    keys=dict.fromkeys(("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head",
        "embedding_size"), ""),
    defaults=sized(30522, 768, 3072, 12, 12, None, 512, type_vocab_size=2, layer_norm_eps=1e-12, hidden_act="gelu"),
    fixed={"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False},
    names={"embed": "embeddings.word_embeddings", "embed_norm": "embeddings.LayerNorm", "norm": None,
        "positions": "embeddings.position_embeddings", "token_types": "embeddings.token_type_embeddings",
        "layer": "encoder.layer", "attn_in": None, "attn_out": "attention.output.LayerNorm", "mlp_in": None,
        "mlp_out": "output.LayerNorm", "q": "attention.self.query", "k": "attention.self.key",
        "v": "attention.self.value", "o": "attention.output.dense", "up": "intermediate.dense", "down": "output.dense"},
)  # fmt: skip
ROBERTA = BERT.but(after_padding=True, label_head="first", defaults={"pad_token_id": 1})
ROTARY = BERT.but(
    gated=True, mlp_bias=False, fixed={"position_embedding_type": "rope"}, names={"positions": None}
)  # fmt: skip
ENCODERS = {
    "BertModel": BERT,
    "CamembertModel": ROBERTA,
    "DistilBertModel": BERT.but(
        label_head="relu",
        keys={"dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
            "hidden_dim": "intermediate_size", "activation": "hidden_act", "tie_weights_": "",
            "sinusoidal_pos_embds": ""},  # the table is in the file in any case
        names={"token_types": None, "layer": "transformer.layer", "attn_out": "sa_layer_norm",
            "mlp_out": "output_layer_norm", "q": "attention.q_lin", "k": "attention.k_lin", "v": "attention.v_lin",
            "o": "attention.out_lin", "up": "ffn.lin1", "down": "ffn.lin2"}),
    "ModernBertModel": Family(
        encoder=True, first_norm=False, pooling="cls", label_head="norm", label_bias="classifier_bias",
        norm="layer", norm_bias="norm_bias", qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias",
        window="pattern", full_every=3, full_first=True, both_sides=True, local_rope="rope_local_base_freq",
        keys={"norm_eps": "layer_norm_eps", "layer_norm_eps": "", "hidden_activation": "hidden_act",
            "global_rope_theta": "rope_theta", "local_rope_theta": "rope_local_base_freq",
            "local_attention": "sliding_window", "global_attn_every_n_layers": "sliding_window_pattern",
            **dict.fromkeys(("decoder_bias", "reference_compile", "sparse_pred_ignore_index"), "")},
        defaults=sized(
            50368, 768, 1152, 22, 12, None, 8192, layer_norm_eps=1e-5, hidden_act="gelu", sliding_window=128,
            sliding_window_pattern=3, rope_theta=160000.0, rope_local_base_freq=10000.0, classifier_pooling="cls"),
        fixed={"classifier_activation": "gelu", "classifier_pooling": ("cls", "mean")},
        names={"embed": "embeddings.tok_embeddings", "embed_norm": "embeddings.norm", "norm": "final_norm",
            "attn_in": "attn_norm", "mlp_in": "mlp_norm", "qkv": "attn.Wqkv", "o": "attn.Wo", "gate_up": "mlp.Wi",
            "down": "mlp.Wo"}),
    "MPNetModel": BERT.but(
        after_padding=True, label_head="first", defaults={"pad_token_id": 1},
        fixed={"pad_token_id": 1, "relative_attention_num_buckets": 32},
        names={"token_types": None, "distances": "encoder.relative_attention_bias", "q": "attention.attn.q",
            "k": "attention.attn.k", "v": "attention.attn.v", "o": "attention.attn.o",
            "attn_out": "attention.LayerNorm"}),
    "NewModel": ROTARY.but(  # Alibaba's GTE
        down_bias=True, defaults=sized(30528, 768, 3072, 12, 12, None, 8192, rope_theta=10000.0, type_vocab_size=1),
        keys=dict.fromkeys(("pack_qkv", "unpad_inputs", "use_memory_efficient_attention"), ""),
        fixed={"layer_norm_type": "layer_norm", "logn_attention_scale": False, "logn_attention_clip1": False},
        names={"qkv": "attention.qkv_proj", "o": "attention.o_proj", "attn_out": "attn_ln", "mlp_out": "mlp_ln",
            "up_gate": "mlp.up_gate_proj", "down": "mlp.down_proj"}),
    "NomicBertModel": ROTARY.but(
        qkv_bias="qkv_proj_bias", o_bias="qkv_proj_bias", mlp_bias="mlp_fc1_bias", down_bias="mlp_fc2_bias",
        activation="silu",
        keys={"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
            "n_inner": "intermediate_size", "n_positions": "max_position_embeddings",
            "layer_norm_epsilon": "layer_norm_eps", "activation_function": "hidden_act",
            "rotary_emb_base": "rope_theta", "rotary_emb_fraction": "partial_rotary_factor",
            **dict.fromkeys(("dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "use_xentropy",
                "max_trained_positions", "scale_attn_weights"), "")},
        defaults=sized(
            30528, 768, 3072, 12, 12, None, 2048, rope_theta=1000.0, partial_rotary_factor=1.0, hidden_act="silu"),
        fixed={"hidden_act": ("silu", "swiglu"), "causal": False, "prenorm": False, "parallel_block": False,
            "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "use_rms_norm": False},
        names={"embed_norm": "emb_ln", "layer": "encoder.layers", "qkv": "attn.Wqkv", "o": "attn.out_proj",
            "attn_out": "norm1", "mlp_out": "norm2", "up": "mlp.fc11", "gate": "mlp.fc12", "down": "mlp.fc2"}),
    "RobertaModel": ROBERTA,
    "XLMRobertaModel": ROBERTA,
}  # fmt: skip
