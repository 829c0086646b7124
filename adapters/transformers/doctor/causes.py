"""Causes that need a forward pass each, in which the oracle scores again with the engine's supposed model, prompts or cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mismatch_ext.adapters.transformers.attention import soft_caps, without_caps
from mismatch_ext.adapters.transformers.doctor.changes import (
    FP8,
    Attending,
    attends_by_torch,
    attributes,
    cached,
    capped,
    expert_outputs,
    fp8,
    int4,
    int8,
    norms,
    own_window,
    partly_rotated,
    quantized,
    rotary,
    rotary_tables,
    rotators,
    rounding_cache,
    scaled,
    seeing,
    weights,
    yarn,
)
from mismatch_ext.adapters.transformers.doctor.models import end_tokens, load_model
from mismatch_ext.adapters.transformers.doctor.scorer import Scorer
from mismatch_ext.adapters.transformers.routing import moe_layout

from mismatch_ext.doctor import Cause
from mismatch_ext.doctor.sample import Floats

THETAS = (0.5, 0.9, 0.98, 1.02, 1.1, 2.0, 10.0, 100.0)
SCALES = (0.25, 0.5, 0.9, 1.1, 2.0)
YARN = (2.0, 4.0, 8.0)
PARTS = (0.25, 0.5, 0.75)
EPSILONS = (0.01, 10.0, 100.0, 1000.0)
WINDOWS = (8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0)
# A window that no sequence is longer than.
WHOLE = 2**30
ATTENTION = (0.5, 0.9, 1.1, 2.0)
CAPS = (5.0, 20.0, 50.0)
GROUPS = (32.0, 64.0, 128.0)
ADAPTER_SCALES = (0.1, 0.25, 0.5, 0.75, 1.5, 2.0, 4.0)
FACTORS = (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)
NORMALIZED = "norm_topk_prob"
Ids = tuple[int, ...]


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
        counts: Numbers of experts per token to try besides those near the trainer's.
    """
    rows = [*_of_arithmetic(scorer, windows), *_of_prompts(scorer), *_of_experts(scorer, counts)]
    for path in older:
        rows += _of_older(scorer, path)
    if base is not None:
        rows += _of_older(scorer, base, base=True)
    # A cause that has nothing to change in this model would predict no difference.
    return [cause for cause in rows if cause.needs and cause.grid]


def _cause(
    scorer: Scorer, key: str, family: str, remedy: str, sentence: str, change: Callable[[float], Any], **given: Any
) -> Cause:
    """Return a cause by a change of the model: a context in which it computes as the engine would with the parameter."""

    def predict(x: float, *, screen: bool = False) -> Floats:
        with change(x):
            return scorer.logprobs(screen=screen)

    return Cause(
        key=key,
        family=family,
        remedy=remedy,
        said=sentence,
        predict=predict,
        screen=partial(predict, screen=True),
        **given,
    )


def _of_arithmetic(scorer: Scorer, windows: Sequence[int]) -> list[Cause]:
    model, cause = scorer.model, partial(_cause, scorer)
    rows = zip(scorer.sample.prompts, scorer.sample.responses, strict=True)
    seen = max(len(prompt) + len(response) for prompt, response in rows) - 1  # by what predicts the last token
    sizes = tuple(sorted({w for w in (*WINDOWS, *map(float, windows)) if w < seen})) or WINDOWS[:1]
    formats, kinds = tuple(FP8.values()), tuple(map(float, range(len(FP8))))
    rope = getattr(getattr(model, "config", None), "rope_parameters", None) or {}
    tables, torchs = bool(rotary_tables(model)), attends_by_torch(model)
    usual = tables and "rope_theta" in rope and rope.get("rope_type", "default") == "default"
    whole = usual and bool(rotators(model)) and rope.get("partial_rotary_factor", 1.0) == 1.0
    return [
        cause("rope_theta", "config", "model", "the engine's rope_theta is {x} times the trainer's",
              lambda x: rotary(model, x, 1.0), grid=THETAS, neutral=1.0, steps=8, needs=tables),
        cause("rope_scale", "config", "model", "the engine's rotary positions are scaled by {x}",
              lambda x: rotary(model, 1.0, x), grid=SCALES, neutral=1.0, steps=8, needs=tables),
        cause("rope_yarn", "config", "model", "the engine extends rotary positions {x} times by YaRN",
              lambda x: yarn(model, x), grid=YARN, neutral=1.0, steps=4, needs=usual),
        cause("partial_rotary", "config", "model", "the engine rotates {x} of each attention head",
              lambda x: partly_rotated(model, x), grid=PARTS, needs=whole),
        cause("norm_eps", "config", "model", "the engine's norm epsilon is {x} times the trainer's",
              lambda x: attributes(norms(model), lambda eps: eps * x), grid=EPSILONS, neutral=1.0, steps=6,
              needs=bool(norms(model))),
        cause("qk_norm_eps", "config", "model", "the engine's epsilon of query and key norms is {x} times the trainer's",
              lambda x: attributes(norms(model, "attn"), lambda eps: eps * x), grid=EPSILONS, neutral=1.0, steps=6,
              needs=bool(norms(model, "attn"))),
        cause("sliding_window", "config", "model", "the engine's attention sees {x} tokens",
              lambda x: seeing(model, int(x)), grid=sizes, needs=torchs or bool(own_window(model))),
        cause("sliding_window", "config", "model", f"the engine's attention sees all tokens, the trainer's {own_window(model)}",
              lambda _: seeing(model, WHOLE), needs=bool(own_window(model))),
        cause("attention_scale", "config", "model", "the engine's scale of attention is {x} times the trainer's",
              lambda x: Attending(scaled(x)), grid=ATTENTION, neutral=1.0, steps=6, needs=torchs),
        cause("attention_softcap", "config", "model", "the engine caps attention's scores softly at {x}",
              lambda x: Attending(capped(x)), grid=CAPS, steps=4, needs=torchs),
        cause("attention_softcap", "config", "model", "the engine's attention has no soft cap, the trainer's model has one",
              lambda _: without_caps(model), needs=bool(soft_caps(model))),
        cause("kv_fp8", "cache", "cache", "the engine's KV cache is fp8 {x}",
              lambda x: Attending(rounding_cache(cached(formats[int(x)]))), grid=kinds, names=tuple(FP8), needs=torchs),
        cause("kv_fp8_truncated", "cache", "cache", "the engine's KV cache is fp8 {x}, rounded towards zero",
              lambda x: Attending(rounding_cache(cached(formats[int(x)], truncated=True))), grid=kinds, names=tuple(FP8),
              needs=torchs),
        cause("weights_int8", "weights", "quantization", "the engine's weights are int8",
              lambda _: weights(model, quantized(model, int8))),
        cause("weights_fp8", "weights", "quantization", "the engine's weights are fp8",
              lambda _: weights(model, quantized(model, fp8))),
        cause("weights_int4", "weights", "quantization", "the engine's weights are 4-bit integers in groups of {x}",
              lambda x: weights(model, quantized(model, int4(int(x)))), grid=GROUPS),
        cause("head_tied", "weights", "model", "the engine's head is its embedding of tokens",
              lambda _: weights(model, _tied(model)), needs=bool(_tied(model))),
    ]  # fmt: skip


def _of_prompts(scorer: Scorer) -> list[Cause]:
    """Return the causes in which an engine sees other prompts: tokens missing at an end, or a special token too many."""
    prompts = scorer.sample.prompts
    config: Any = getattr(scorer.model, "config", None)
    special = [getattr(config, name, None) for name in ("bos_token_id", "pad_token_id")]
    # Special tokens that a template or tokenizer may add.
    added = tuple(dict.fromkeys([*(token for token in special if isinstance(token, int)), *end_tokens(scorer.model)]))
    # The last choice of an extra token is each prompt's own first token.
    common = {prompt[0] for prompt in prompts}
    first = f"{common.pop()}" if len(common) == 1 else "its own first one"
    extra = (*map(str, added), f"{first}, twice")

    def cause(key: str, sentence: str, change: Callable[[int, Ids], Ids], **given: Any) -> Cause:
        def predict(x: float, *, screen: bool = False) -> Floats:
            return scorer.logprobs(prompt=partial(change, int(x)), screen=screen)

        return Cause(
            key=key, family="prompt", remedy="prompt", said=sentence, predict=predict, screen=partial(predict, screen=True),
            **given,
        )  # fmt: skip

    return [
        cause("missing_first", "the engine's prompt lacks its first {x} tokens",
              lambda x, ids: ids[min(x, len(ids) - 1) :], grid=(1.0, 2.0, 3.0)),
        cause("missing_last", "the engine's prompt lacks its last {x} tokens",
              lambda x, ids: ids[: max(1, len(ids) - x)], grid=(1.0, 2.0)),
        cause("extra_token", "the engine's prompt begins with an extra token {x}",
              lambda x, ids: ((*added, ids[0])[x], *ids), grid=_indices(extra), names=extra),
    ]  # fmt: skip


def _of_experts(scorer: Scorer, counts: Sequence[int]) -> list[Cause]:
    """Return the causes in models with experts: how an engine weighs the chosen experts, and how many it chooses."""
    if scorer.shape is None:
        return []
    layout, cause = moe_layout(scorer.model), partial(_cause, scorer)
    experts = list({router.layer: router.experts for router in layout.routers if router.experts is not None}.values())
    flags = [(router.module, NORMALIZED) for router in layout.routers if hasattr(router.module, NORMALIZED)]
    normalizes = "does not normalize" if flags and getattr(*flags[0]) else "normalizes"
    chooses = [(router.module, "top_k") for router in layout.routers]
    near = (*counts, 1, layout.top_k // 2, layout.top_k - 1, layout.top_k + 1, layout.top_k * 2)
    near = tuple(dict.fromkeys(k for k in near if 0 < k <= layout.num_experts and k != layout.top_k))
    # If the engine recorded its routes, it has as many experts per token as the trainer; otherwise they were refused.
    counted = scorer.sample.routes is None and all(hasattr(router, name) for router, name in chooses)
    return [
        cause("expert_scale", "config", "model", "the engine's experts weigh {x} times the trainer's",
              lambda x: expert_outputs(experts, x), grid=FACTORS, neutral=1.0, steps=6, needs=bool(experts)),
        cause("expert_norm", "config", "model",
              f"the engine {normalizes} the weights of the chosen experts, other than the trainer",
              lambda _: attributes(flags, lambda before: not before), needs=bool(flags)),
        cause("experts_per_token", "config", "model", "the engine chooses {x} experts for each token",
              lambda x: attributes(chooses, lambda _: int(x)), grid=tuple(map(float, near)), needs=counted),
    ]  # fmt: skip


def _of_older(scorer: Scorer, path: str | Path, *, base: bool = False) -> list[Cause]:
    """Return the causes in which weights are another checkpoint's, such as the base model's of the trainer's adapter."""
    other = load_model(path, "--model" if base else "--older")
    theirs = {name: p.detach().to(scorer.engine_dtype) for name, p in other.named_parameters()}
    # Numbered layers first, then embedding, last norm and head.
    pieces = sorted(dict.fromkeys(map(_piece, theirs)), key=lambda piece: not piece.startswith("layer "))
    has = f"the engine has the weights of {path}"
    key, sentence = ("adapter_not_applied", f"{has}: the adapter is not applied") if base else ("stale_weights", has)

    def of_piece(x: float) -> Any:
        return weights(scorer.model, {name: w for name, w in theirs.items() if _piece(name) == pieces[int(x)]})

    def at_scale(x: float) -> Any:
        own = dict(scorer.model.named_parameters())
        between = {name: torch.lerp(w.float(), own[name].detach(), x) for name, w in theirs.items() if name in own}
        return weights(scorer.model, {name: w.to(scorer.engine_dtype) for name, w in between.items()})

    return [
        _cause(scorer, key, "weights", "adapter" if base else "weights", sentence, lambda _: weights(scorer.model, theirs)),
        _cause(scorer, "stale_layer", "weights", "weights", f"{{x}} of the engine has the weights of {path}",
               of_piece, grid=_indices(pieces), names=tuple(pieces)),
        _cause(scorer, "adapter_scale", "weights", "adapter_scale", "the engine adds {x} times what the trainer's adapter adds",
               at_scale, grid=ADAPTER_SCALES, neutral=1.0, steps=8, needs=base),
    ]  # fmt: skip


def _indices(listed: Sequence[Any]) -> tuple[float, ...]:
    return tuple(map(float, range(len(listed))))


def _piece(name: str) -> str:
    """Return the part of a model that a parameter belongs to: a numbered layer, or else the module that holds it."""
    layer = name.partition("layers.")[2].partition(".")[0]
    return f"layer {layer}" if layer.isdigit() else name.split(".")[-2]


def _tied(model: Any) -> dict[str, Any]:
    """Return the embedding as the head's weight; nothing if they are the same tensor or differ in shape."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    heads = next((name for name, p in model.named_parameters() if head is not None and p is head.weight), None)
    if heads is None or embedding.weight is head.weight or embedding.weight.shape != head.weight.shape:
        return {}
    return {heads: embedding.weight.detach().clone()}
