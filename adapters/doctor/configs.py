"""Compares the model configurations of the two sides, to say which side is at fault."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mismatch_ext.adapters.doctor.sides import Run

if TYPE_CHECKING:
    from mismatch_ext.doctor import Diagnosis, NamedCause

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


def with_configs(diagnosis: Diagnosis, sides: Run) -> Diagnosis:
    """Return a diagnosis whose causes quote both configurations, so that the reader can tell which side is at fault.

    Args:
        diagnosis: The diagnosis from the tokens.
        sides: The run.
    """
    differing = differences(sides)
    causes = tuple(_quoting(cause, differing) for cause in diagnosis.causes)
    told = {path for cause in diagnosis.causes for path in differing if _field(path) in FIELDS.get(cause.key, ())}
    notes = [
        f"the configurations differ in {path}, which no named cause stands for; give both sides the same value before you look "
        f"further, since not every value is tried here: {_both(path, *differing[path])}"
        for path in differing
        if path not in told
    ]
    return replace(diagnosis, causes=causes, notes=(*diagnosis.notes, *notes))


def differences(sides: Run) -> dict[str, tuple[Any, Any]]:
    """Return the engine's and the trainer's value of each field in `FIELDS` that differs, by the field's path."""
    trainer = dict(_flat(_config(sides.model)))
    overrides = sides.arguments.get("hf_overrides", {})
    engine = dict(
        _flat(_config(sides.engine_model or sides.model) | (overrides if isinstance(overrides, dict) else {}))
    )
    return {
        path: (engine.get(path), trainer.get(path))
        for path in sorted(engine.keys() | trainer.keys())
        if _field(path) in KNOWN and engine.get(path) != trainer.get(path)
    }


def engines_own(sides: Run, field: str) -> tuple[int, ...]:
    """Return the integers that the engine's configuration has in a field where the trainer's has another value."""
    return tuple(
        engine for path, (engine, _) in differences(sides).items() if _field(path) == field and isinstance(engine, int)
    )


def _quoting(cause: NamedCause, differing: Mapping[str, tuple[Any, Any]]) -> NamedCause:
    if cause.key not in FIELDS:
        return cause
    both = [_both(path, *values) for path, values in differing.items() if _field(path) in FIELDS[cause.key]]
    quoted = "; ".join(both) or "both configurations say the same of it, so that weights or code of one side do it"
    return replace(cause, said=f"{cause.said} ({quoted})")


def _both(path: str, engine: Any, trainer: Any) -> str:
    return f"the engine's config has {_field(path)} {engine}, the trainer's {trainer}"


def _field(path: str) -> str:
    return path.rpartition(".")[2]


def _config(path: str) -> dict[str, Any]:
    from mismatch_ext.adapters.transformers.peft_adapters import whole
    from transformers import AutoConfig

    return dict(AutoConfig.from_pretrained(whole(path)).to_dict())


def _flat(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value
