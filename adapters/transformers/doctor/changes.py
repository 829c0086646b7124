"""Temporary changes of a model or of its arithmetic, such as an engine may have made."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Round = Callable[[Tensor], Tensor]
ROTATE = "apply_rotary_pos_emb"
# Formats of a KV cache, by their names.
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FP8_LARGEST, INT8_LARGEST, INT4_LARGEST = 448.0, 127.0, 7.0


def rotary_tables(model: nn.Module) -> list[nn.Module]:
    """Return every module that holds the frequencies of a rotary embedding."""
    return [m for m in model.modules() if isinstance(getattr(m, "inv_freq", None), Tensor)]


def norms(model: nn.Module, only: str = "") -> list[tuple[nn.Module, str]]:
    """Return the modules with an epsilon whose path contains `only`, each with the name of that attribute."""
    return [
        (m, name)
        for path, m in model.named_modules()
        for name in ("variance_epsilon", "eps")
        if hasattr(m, name) and only in path
    ]


def attends_by_torch(model: nn.Module) -> bool:
    """Tell whether attention is torch's own function, whose calls can be changed."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None) == "sdpa"


def rotators(model: nn.Module) -> list[Any]:
    """Return the Python modules whose attention rotates queries and keys by a function of the usual name."""
    modules = {type(m).__module__ for path, m in model.named_modules() if path.endswith("attn")}
    return [code for name in sorted(modules) if hasattr(code := sys.modules[name], ROTATE)]


@contextmanager
def attributes(places: list[tuple[Any, str]], change: Callable[[Any], Any]) -> Iterator[None]:
    """Change attributes of objects, and restore them afterwards."""
    values = [getattr(place, name) for place, name in places]
    try:
        for (place, name), before in zip(places, values, strict=True):
            setattr(place, name, change(before))
        yield
    finally:
        for (place, name), before in zip(places, values, strict=True):
            setattr(place, name, before)


def rotary(model: nn.Module, theta: float, scale: float) -> Any:
    """Change the frequencies theta^(-i/n) of every rotary embedding: multiply theta by `theta`, and all of them by `scale`."""

    def change(table: Tensor) -> Tensor:
        powers = torch.arange(len(table), device=table.device) / len(table)
        return table * scale * theta**-powers

    return attributes([(m, "inv_freq") for m in rotary_tables(model)], change)


@contextmanager
def yarn(model: nn.Module, factor: float) -> Iterator[None]:
    """Extend positions by YaRN, as a checkpoint of `factor` times the trained length does."""
    tables = rotary_tables(model)
    config: Any = copy.deepcopy(model.config)
    config.rope_parameters = {
        **config.rope_parameters, "rope_type": "yarn", "factor": factor,
        "original_max_position_embeddings": config.max_position_embeddings,
    }  # fmt: skip
    frequencies, scaling = ROPE_INIT_FUNCTIONS["yarn"](config, tables[0].inv_freq.device)
    with attributes([(m, "inv_freq") for m in tables], lambda _: frequencies):
        with attributes([(m, "attention_scaling") for m in tables], lambda _: scaling):
            yield


@contextmanager
def partly_rotated(model: nn.Module, factor: float) -> Iterator[None]:
    """Rotate only the first part of each head, a share `factor` of it."""
    tables = rotary_tables(model)
    config: Any = model.config
    theta = float(config.rope_parameters["rope_theta"])

    def frequencies(table: Tensor) -> Tensor:
        count = max(1, int(len(table) * factor))
        return 1.0 / theta ** (torch.arange(count, device=table.device) / count)

    def rotated(whole: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        def part(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            width = cos.shape[-1]
            first, second = whole(q[..., :width], k[..., :width], cos, sin, *args, **kwargs)
            return torch.cat([first, q[..., width:]], -1), torch.cat([second, k[..., width:]], -1)

        return part

    with ExitStack() as stack:
        stack.enter_context(attributes([(m, "inv_freq") for m in tables], frequencies))
        stack.enter_context(attributes([(code, ROTATE) for code in rotators(model)], rotated))
        yield


@contextmanager
def weights(model: nn.Module, changed: Mapping[str, Tensor]) -> Iterator[None]:
    """Put other weights into the model's parameters of the same name and shape, and restore them afterwards."""
    parameters = dict(model.named_parameters())
    fitting = {name: w for name, w in changed.items() if name in parameters and parameters[name].shape == w.shape}
    originals = {name: parameters[name].detach().clone() for name in fitting}
    try:
        with torch.no_grad():
            for name, weight in fitting.items():
                parameters[name].copy_(weight)
        yield
    finally:
        with torch.no_grad():
            for name, weight in originals.items():
                parameters[name].copy_(weight)


class Attending(TorchFunctionMode):
    """Replaces torch's attention by another function of the same arguments."""

    def __init__(self, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self._attention = attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._attention if func is scaled_dot_product_attention else func)(*args, **(kwargs or {}))


def rounding_cache(rounded: Round) -> Callable[..., Tensor]:
    """Return attention to keys and values that are rounded as a cache would hold them."""

    def attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **given: Any) -> Tensor:
        return scaled_dot_product_attention(query, rounded(key), rounded(value), *rest, **given)

    return attention


def windowed(window: int) -> Callable[..., Tensor]:
    """Return attention that does not see what lies further back than a window, which includes the token itself."""

    def attention(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        seen, back = _seen(query, key, given.get("attn_mask"))
        # A padded query sees itself, so that no row of the softmax is empty.
        given |= {"attn_mask": (seen & (back < window)) | (back == 0), "is_causal": False}
        return scaled_dot_product_attention(query, key, value, **given)

    return attention


def own_window(model: nn.Module) -> int | None:
    """Return the size of the sliding window that a model has in some layers; None if it has none."""
    config = getattr(model, "config", None)
    text: Any = config.get_text_config() if config is not None else None
    slides = "sliding_attention" in (getattr(text, "layer_types", None) or ())
    return getattr(text, "sliding_window", None) if slides else None


def seeing(model: Any, window: int) -> Any:
    """Give a model's sliding layers another window, which may be larger; all layers if the model has no window."""
    if own_window(model) is None:
        return Attending(windowed(window))
    return attributes([(model.config.get_text_config(), "sliding_window")], lambda _: window)


def scaled(factor: float) -> Callable[..., Tensor]:
    """Return attention whose scale is multiplied by a factor."""

    def attention(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        scale = given.get("scale") or query.shape[-1] ** -0.5
        return scaled_dot_product_attention(query, key, value, **given | {"scale": scale * factor})

    return attention


def capped(cap: float) -> Callable[..., Tensor]:
    """Return attention whose scores are capped softly, at `cap * tanh(score / cap)`."""

    def attention(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        seen, back = _seen(query, key, given.get("attn_mask"))
        if given.get("enable_gqa"):
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scale = given.get("scale") or query.shape[-1] ** -0.5
        scores = cap * torch.tanh(query @ key.mT * scale / cap)
        return scores.masked_fill(~(seen | (back == 0)), -math.inf).softmax(-1) @ value

    return attention


def _seen(query: Tensor, key: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return which keys each query sees, and how far back the keys lie."""
    at = torch.arange(key.shape[-2], device=key.device)
    back = at[-query.shape[-2] :, None] - at
    seen = back >= 0
    if mask is not None:
        seen = seen & (mask if mask.dtype == torch.bool else mask == 0)
    return seen, back


@contextmanager
def expert_outputs(modules: list[nn.Module], factor: float) -> Iterator[None]:
    """Multiply what the experts of each layer put out."""
    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(lambda _, inputs, output: output * factor).remove)
        yield


def quantized(model: nn.Module, rounded: Round) -> dict[str, Tensor]:
    """Return the rounded weights of linear layers and experts, by name; the head is not quantized."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    linear = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    matrices = {n: p for n, p in model.named_parameters() if n in linear or p.dim() == 3}
    # Each half is rounded by itself: checkpoints hold gate and up of an expert apart, but transformers holds them as one matrix.
    return {
        name: torch.cat([rounded(part) for part in p.detach().chunk(2, 1)], 1)
        if "gate_up" in name
        else rounded(p.detach())
        for name, p in matrices.items()
    }


def int8(x: Tensor) -> Tensor:
    """Round to int8, symmetrically, with a scale for each row."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / INT8_LARGEST
    return (x / scale).round().clamp(-INT8_LARGEST, INT8_LARGEST) * scale


def int4(size: int) -> Round:
    """Return symmetric rounding to 4 bits, with a scale for each group of `size` inputs; other widths stay as they are."""

    def rounded(weight: Tensor) -> Tensor:
        if weight.shape[-1] % size:
            return weight
        groups = weight.reshape(-1, size)
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / INT4_LARGEST
        return ((groups / scale).round().clamp(-INT4_LARGEST - 1, INT4_LARGEST) * scale).reshape(weight.shape)

    return rounded


def fp8(weight: Tensor) -> Tensor:
    """Round to fp8 (e4m3), with a scale for each matrix."""
    scale = weight.abs().amax((-2, -1), keepdim=True).clamp(min=1e-12) / FP8_LARGEST
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


def cached(kind: torch.dtype, *, truncated: bool = False) -> Round:
    """Return the rounding of a cache in an 8-bit float, to the nearest value or towards zero."""

    def rounded(x: Tensor) -> Tensor:
        nearest = x.bfloat16().to(kind)
        if not truncated:
            return nearest.to(x.dtype)
        over = nearest.to(x.dtype).abs() > x.bfloat16().to(x.dtype).abs()
        # These formats are sign and magnitude, so subtracting 1 from the bits is one step towards zero.
        lower = (nearest.view(torch.uint8) - 1).view(kind)
        return torch.where(over, lower.to(x.dtype), nearest.to(x.dtype))

    return rounded
