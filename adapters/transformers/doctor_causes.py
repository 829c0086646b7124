"""Causes that need a forward pass each: the oracle is scored once more as if its model, prompts or cache were the engine's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from mismatch_ext.adapters.transformers.doctor import Scorer, end_tokens, load_model
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from mismatch_ext.doctor import Cause
from mismatch_ext.doctor.sample import Floats

Round = Callable[[Tensor], Tensor]
THETAS = (0.5, 0.9, 0.98, 1.02, 1.1, 2.0, 10.0, 100.0)
SCALES = (0.25, 0.5, 0.9, 1.1, 2.0)
EPSILONS = (0.01, 10.0, 100.0, 1000.0)
WINDOWS = (8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0)
FP8_LARGEST, INT8_LARGEST = 448.0, 127.0


def of_model(scorer: Scorer, older: Sequence[str | Path] = ()) -> list[Cause]:
    """Return the causes that a changed model shows.

    Args:
        scorer: Of the sample; its model is changed while a cause is tried, and restored.
        older: Checkpoints whose weights an engine may have kept: those before, or the base without its adapter.
    """
    model = scorer.model
    longest = max(map(len, scorer.sample.responses))

    def under(change: Callable[[float], Any]) -> Callable[[float], Floats]:
        def predict(x: float) -> Floats:
            with change(x):
                return scorer.logprobs()

        return predict

    found = [
        Cause(key="rope_theta", family="config", said="the engine's rope_theta is {x} times the trainer's",
              predict=under(lambda x: _rotary(model, x, 1.0)), grid=THETAS, neutral=1.0, steps=8),
        Cause(key="rope_scale", family="config", said="the engine's rotary positions are scaled by {x}",
              predict=under(lambda x: _rotary(model, 1.0, x)), grid=SCALES, neutral=1.0, steps=8),
        Cause(key="norm_eps", family="config", said="the engine's norm epsilon is {x} times the trainer's",
              predict=under(lambda x: _epsilon(model, x)), grid=EPSILONS, neutral=1.0, steps=6),
        Cause(key="sliding_window", family="config", said="the engine's attention sees {x} tokens",
              predict=under(lambda x: _Windowed(int(x))), grid=tuple(w for w in WINDOWS if w < longest) or WINDOWS[:1]),
        Cause(key="missing_first", family="prompt", said="the engine's prompt lacks its first {x} tokens",
              predict=lambda x: scorer.logprobs(prompt=lambda ids: ids[min(int(x), len(ids) - 1) :]), grid=(1.0, 2.0, 3.0)),
        Cause(key="missing_last", family="prompt", said="the engine's prompt lacks its last {x} tokens",
              predict=lambda x: scorer.logprobs(prompt=lambda ids: ids[: max(1, len(ids) - int(x))]), grid=(1.0, 2.0)),
        Cause(key="kv_fp8", family="cache", said="the engine's KV cache is fp8",
              predict=under(lambda _: _Cached(_to_nearest))),
        Cause(key="kv_fp8_truncated", family="cache", said="the engine's KV cache is fp8, rounded towards zero",
              predict=under(lambda _: _Cached(_truncated))),
        Cause(key="weights_int8", family="weights", said="the engine's weights are int8",
              predict=under(lambda _: _weights(model, _quantised(model, _int8)))),
        Cause(key="weights_fp8", family="weights", said="the engine's weights are fp8",
              predict=under(lambda _: _weights(model, _quantised(model, _fp8)))),
    ]  # fmt: skip
    # What this family of models has no hold for would change nothing, and is not on the list.
    holds = {
        "rope_theta": bool(_tables(model)),
        "rope_scale": bool(_tables(model)),
        "norm_eps": bool(_norms(model)),
        "sliding_window": _attends_by_torch(model),
        "kv_fp8": _attends_by_torch(model),
        "kv_fp8_truncated": _attends_by_torch(model),
    }
    found = [cause for cause in found if holds.get(cause.key, True)]
    added = _first_tokens(model)
    if added:
        found.append(
            Cause(key="extra_token", family="prompt", said="the engine's prompt begins with an extra token {x}",
                  predict=lambda x: scorer.logprobs(prompt=lambda ids: (added[int(x)], *ids)),
                  grid=tuple(map(float, range(len(added)))), names=tuple(map(str, added)))
        )  # fmt: skip
    for path in older:
        found += _of_older(scorer, path)
    return found


def _of_older(scorer: Scorer, path: str | Path) -> list[Cause]:
    """Return the causes that all weights, or those of one layer, are another checkpoint's."""
    model = scorer.model
    theirs = {name: p.detach().to(scorer.engine_dtype) for name, p in load_model(path, "--older").named_parameters()}
    layers = sorted({int(part) for name in theirs if "layers." in name and (part := _layer(name)).isdigit()})

    def whole(_: float) -> Floats:
        with _weights(model, theirs):
            return scorer.logprobs()

    def one(x: float) -> Floats:
        with _weights(model, {name: p for name, p in theirs.items() if _layer(name) == str(layers[int(x)])}):
            return scorer.logprobs()

    found = [
        Cause(key="stale_weights", family="weights", said=f"the engine has the weights of {path}", predict=whole),
        Cause(key="stale_layer", family="weights", said=f"layer {{x}} of the engine has the weights of {path}", predict=one,
              grid=tuple(map(float, range(len(layers)))), names=tuple(map(str, layers))),
    ]  # fmt: skip
    return found if layers else found[:1]


def _layer(name: str) -> str:
    return name.partition("layers.")[2].partition(".")[0]


def _first_tokens(model: nn.Module) -> tuple[int, ...]:
    """Return the special tokens that a template or tokenizer may put before a prompt."""
    config: Any = getattr(model, "config", None)
    known = [getattr(config, name, None) for name in ("bos_token_id", "pad_token_id")]
    return tuple(dict.fromkeys([*(token for token in known if isinstance(token, int)), *end_tokens(model)]))


def _tables(model: nn.Module) -> list[Tensor]:
    """Return the frequencies of every rotary embedding."""
    return [found for m in model.modules() if isinstance(found := getattr(m, "inv_freq", None), Tensor)]


def _norms(model: nn.Module) -> list[tuple[nn.Module, str]]:
    return [(m, name) for m in model.modules() for name in ("variance_epsilon", "eps") if hasattr(m, name)]


def _attends_by_torch(model: nn.Module) -> bool:
    return getattr(getattr(model, "config", None), "_attn_implementation", None) == "sdpa"


@contextmanager
def _rotary(model: nn.Module, theta: float, scale: float) -> Iterator[None]:
    """Change the frequencies theta^(-i/n) of every rotary embedding."""
    tables = _tables(model)
    kept = [table.clone() for table in tables]
    try:
        for table in tables:
            powers = torch.arange(len(table), device=table.device) / len(table)
            table.mul_(scale * theta**-powers)
        yield
    finally:
        for table, before in zip(tables, kept, strict=True):
            table.copy_(before)


@contextmanager
def _epsilon(model: nn.Module, factor: float) -> Iterator[None]:
    norms = _norms(model)
    kept = [getattr(module, name) for module, name in norms]
    try:
        for (module, name), before in zip(norms, kept, strict=True):
            setattr(module, name, before * factor)
        yield
    finally:
        for (module, name), before in zip(norms, kept, strict=True):
            setattr(module, name, before)


@contextmanager
def _weights(model: nn.Module, changed: Mapping[str, Tensor]) -> Iterator[None]:
    """Put other weights into a model; those of the same name and shape."""
    own = dict(model.named_parameters())
    fitting = {name: w for name, w in changed.items() if name in own and own[name].shape == w.shape}
    kept = {name: own[name].detach().clone() for name in fitting}
    try:
        with torch.no_grad():
            for name, weight in fitting.items():
                own[name].copy_(weight)
        yield
    finally:
        with torch.no_grad():
            for name, weight in kept.items():
                own[name].copy_(weight)


class _Cached(TorchFunctionMode):
    """Rounds keys and values as a cache would hold them, on their way into attention."""

    def __init__(self, rounded: Round) -> None:
        super().__init__()
        self._rounded = rounded

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            query, key, value, *rest = args
            args = (query, self._rounded(key), self._rounded(value), *rest)
        return func(*args, **(kwargs or {}))


class _Windowed(TorchFunctionMode):
    """Hides what lies further back than a window, itself included, from attention."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self._window = window

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is scaled_dot_product_attention:
            query, key, _ = args
            at = torch.arange(key.shape[-2], device=key.device)
            back = at[-query.shape[-2] :, None] - at
            seen = (back >= 0) & (back < self._window)
            mask = given.get("attn_mask")
            if mask is not None:
                seen = seen & (mask if mask.dtype == torch.bool else mask == 0)
            # A padded query sees itself, so that no row of the softmax is empty.
            given |= {"attn_mask": seen | (back == 0), "is_causal": False}
        return func(*args, **given)


def _to_nearest(x: Tensor) -> Tensor:
    return x.bfloat16().to(torch.float8_e4m3fn).to(x.dtype)


def _truncated(x: Tensor) -> Tensor:
    nearest = x.bfloat16().to(torch.float8_e4m3fn)
    over = nearest.to(x.dtype).abs() > x.bfloat16().to(x.dtype).abs()
    # One step towards zero is one bit less: sign and magnitude.
    lower = (nearest.view(torch.uint8) - 1).view(torch.float8_e4m3fn)
    return torch.where(over, lower.to(x.dtype), nearest.to(x.dtype))


def _quantised(model: nn.Module, rounded: Round) -> dict[str, Tensor]:
    """Return what quantisation leaves of the weights that it is applied to: linear layers and experts, not the head."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    linear = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    kept = {n: p for n, p in model.named_parameters() if n in linear or p.dim() == 3}
    # Checkpoints hold gate and up of an expert apart, transformers as one matrix.
    return {
        name: torch.cat([rounded(part) for part in p.detach().chunk(2, 1)], 1)
        if "gate_up" in name
        else rounded(p.detach())
        for name, p in kept.items()
    }


def _int8(weight: Tensor) -> Tensor:
    """Symmetric, a scale for each output channel."""
    scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / INT8_LARGEST
    return (weight / scale).round().clamp(-INT8_LARGEST, INT8_LARGEST) * scale


def _fp8(weight: Tensor) -> Tensor:
    """e4m3, a scale for each matrix."""
    scale = weight.abs().amax((-2, -1), keepdim=True).clamp(min=1e-12) / FP8_LARGEST
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale
