"""Causes that need a forward pass each, in which the oracle scores again with the engine's supposed model, prompts or cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mismatch_ext.adapters.transformers.doctor import Scorer, scored_under
from mismatch_ext.adapters.transformers.doctor_changes import (
    AttentionCapped,
    AttentionScaled,
    Cached,
    Windowed,
    attends_by_torch,
    attributes,
    norms,
    partly_rotated,
    rotary,
    rotary_tables,
    rotators,
    weights,
    yarn,
)
from mismatch_ext.adapters.transformers.doctor_experts import of_experts
from mismatch_ext.adapters.transformers.doctor_older import of_older
from mismatch_ext.adapters.transformers.doctor_prompts import of_prompts
from mismatch_ext.adapters.transformers.doctor_quantised import (
    FP8,
    cached,
    fp8,
    int4,
    int8,
    quantised,
    with_int8_activations,
)

from mismatch_ext.doctor import Cause

THETAS = (0.5, 0.9, 0.98, 1.02, 1.1, 2.0, 10.0, 100.0)
SCALES = (0.25, 0.5, 0.9, 1.1, 2.0)
YARN = (2.0, 4.0, 8.0)
PARTS = (0.25, 0.5, 0.75)
EPSILONS = (0.01, 10.0, 100.0, 1000.0)
WINDOWS = (8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0)
ATTENTION = (0.5, 0.9, 1.1, 2.0)
CAPS = (5.0, 20.0, 50.0)
GROUPS = (32.0, 64.0, 128.0)


def of_model(
    scorer: Scorer,
    older: Sequence[str | Path] = (),
    base: str | None = None,
    windows: Sequence[int] = (),
    counts: Sequence[int] = (),
) -> list[Cause]:
    """Return the causes that need a forward pass of a changed model each.

    Args:
        scorer: The scorer of the sample; its model is changed while a cause is tried, and then restored.
        older: Checkpoints or adapters whose weights an engine may have kept.
        base: Base model of the trainer's adapter, whose weights an engine without the adapter has.
        windows: Sizes of a sliding window to try besides the usual ones, in tokens.
        counts: Numbers of experts per token to try besides the usual ones.
    """
    model = scorer.model
    longest = max(map(len, scorer.sample.responses))
    seen = tuple(sorted({w for w in (*WINDOWS, *map(float, windows)) if w < longest}))

    formats, kinds = tuple(FP8.values()), tuple(map(float, range(len(FP8))))

    def cause(
        key: str, family: str, said: str, change: Callable[[float], Any], remedy: str = "model", **given: Any
    ) -> Cause:
        return scored_under(scorer, change, key=key, family=family, said=said, remedy=remedy, **given)

    found = [
        cause("rope_theta", "config", "the engine's rope_theta is {x} times the trainer's",
              lambda x: rotary(model, x, 1.0), grid=THETAS, neutral=1.0, steps=8),
        cause("rope_scale", "config", "the engine's rotary positions are scaled by {x}",
              lambda x: rotary(model, 1.0, x), grid=SCALES, neutral=1.0, steps=8),
        cause("rope_yarn", "config", "the engine extends rotary positions {x} times by YaRN",
              lambda x: yarn(model, x), grid=YARN, neutral=1.0, steps=4),
        cause("partial_rotary", "config", "the engine rotates {x} of each attention head",
              lambda x: partly_rotated(model, x), grid=PARTS),
        cause("norm_eps", "config", "the engine's norm epsilon is {x} times the trainer's",
              lambda x: _epsilon(model, x), grid=EPSILONS, neutral=1.0, steps=6),
        cause("qk_norm_eps", "config", "the engine's epsilon of query and key norms is {x} times the trainer's",
              lambda x: _epsilon(model, x, "attn"), grid=EPSILONS, neutral=1.0, steps=6),
        cause("sliding_window", "config", "the engine's attention sees {x} tokens",
              lambda x: Windowed(int(x)), grid=seen or WINDOWS[:1]),
        cause("attention_scale", "config", "the engine's scale of attention is {x} times the trainer's",
              AttentionScaled, grid=ATTENTION, neutral=1.0, steps=6),
        cause("attention_softcap", "config", "the engine caps attention's scores softly at {x}",
              AttentionCapped, grid=CAPS, steps=4),
        cause("kv_fp8", "cache", "the engine's KV cache is fp8 {x}", lambda x: Cached(cached(formats[int(x)])),
              remedy="cache", grid=kinds, names=tuple(FP8)),
        cause("kv_fp8_truncated", "cache", "the engine's KV cache is fp8 {x}, rounded towards zero",
              lambda x: Cached(cached(formats[int(x)], truncated=True)), remedy="cache", grid=kinds, names=tuple(FP8)),
        cause("weights_int8", "weights", "the engine's weights are int8",
              lambda _: weights(model, quantised(model, int8)), "quantization"),
        cause("activations_int8", "weights", "the engine's weights and activations are int8",
              lambda _: with_int8_activations(model), "quantization"),
        cause("weights_fp8", "weights", "the engine's weights are fp8",
              lambda _: weights(model, quantised(model, fp8)), "quantization"),
        cause("weights_int4", "weights", "the engine's weights are 4-bit integers in groups of {x}",
              lambda x: weights(model, quantised(model, int4(int(x)))), "quantization", grid=GROUPS),
        cause("head_tied", "weights", "the engine's head is its embedding of tokens", lambda _: weights(model, _tied(model))),
    ]  # fmt: skip
    # A cause that finds nothing to change in this model would predict no difference, so it is left out of the list.
    tables, torch_attends = bool(rotary_tables(model)), attends_by_torch(model)
    usual = tables and _rope(model).get("rope_type", "default") == "default"
    holds = {
        "rope_theta": tables,
        "rope_scale": tables,
        "rope_yarn": usual,
        "partial_rotary": usual and bool(rotators(model)) and _rope(model).get("partial_rotary_factor", 1.0) == 1.0,
        "norm_eps": bool(norms(model)),
        "qk_norm_eps": bool(norms(model, "attn")),
        "head_tied": bool(_tied(model)),
    } | dict.fromkeys(
        ("sliding_window", "attention_scale", "attention_softcap", "kv_fp8", "kv_fp8_truncated"), torch_attends
    )
    found = [listed for listed in found if holds.get(listed.key, True)] + of_prompts(scorer)
    found += of_experts(scorer, counts)
    for path in older:
        found += of_older(scorer, path)
    return found if base is None else found + of_older(scorer, base, base=True)


def _epsilon(model: Any, factor: float, only: str = "") -> Any:
    return attributes(norms(model, only), lambda eps: eps * factor)


def _rope(model: Any) -> dict[str, Any]:
    found = getattr(getattr(model, "config", None), "rope_parameters", None) or {}
    return found if "rope_theta" in found else {"rope_type": "several"}


def _tied(model: Any) -> dict[str, Any]:
    """Return the embedding as the head's weight; nothing if they are the same tensor or differ in shape."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    own = next((name for name, p in model.named_parameters() if head is not None and p is head.weight), None)
    if own is None or embedding.weight is head.weight or embedding.weight.shape != head.weight.shape:
        return {}
    return {own: embedding.weight.detach().clone()}
