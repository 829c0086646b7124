"""What the model configurations of two sides say of a cause, so that a reader sees which side is at fault."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

Differing = Mapping[str, tuple[Any, Any]]
"""The engine's and the trainer's value of each field that differs, by the field's path."""

# Configuration fields by the cause that a wrong value of them makes; the last part of the field's path.
FIELDS = {
    "rope_theta": ("rope_theta",),
    "rope_scale": ("rope_type", "factor"),
    "rope_yarn": ("rope_type", "factor"),
    "partial_rotary": ("partial_rotary_factor",),
    "norm_eps": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"),
    "sliding_window": ("sliding_window", "use_sliding_window"),
    "attention_scale": ("query_pre_attn_scalar", "attention_multiplier"),
    "attention_softcap": ("attn_logit_softcapping",),
    "softcap": ("final_logit_softcapping",),
    "logit_scale": ("logit_scale", "logits_scaling"),
    "padded_vocabulary": ("vocab_size",),
    "expert_scale": ("routed_scaling_factor",),
    "expert_norm": ("norm_topk_prob",),
    "experts_per_token": ("num_experts_per_tok",),
    "head_tied": ("tie_word_embeddings",),
}
KNOWN = frozenset(field for fields in FIELDS.values() for field in fields)


def quote(key: str, said: str, differing: Differing) -> str:
    """Return the sentence of a cause with both configurations' values of the fields that could make it."""
    if key not in FIELDS:
        return said
    both = [_both(path, *values) for path, values in differing.items() if last_part(path) in FIELDS[key]]
    quoted = "; ".join(both) or "both configurations say the same of it, so that weights or code of one side do it"
    return f"{said} ({quoted})"


def told_by(keys: Collection[str], differing: Differing) -> list[str]:
    """Return a note on each field that differs and that none of the named causes stands for."""
    told = {field for key in keys for field in FIELDS.get(key, ())}
    return [
        f"the configurations differ in {path}, which no named cause stands for; give both sides the same value before you look "
        f"further, since not every value is tried here: {_both(path, *values)}"
        for path, values in differing.items()
        if last_part(path) not in told
    ]


def last_part(path: str) -> str:
    """Return the name of a field without what it is part of."""
    return path.rpartition(".")[2]


def _both(path: str, engine: Any, trainer: Any) -> str:
    return f"the engine's config has {last_part(path)} {engine}, the trainer's {trainer}"
