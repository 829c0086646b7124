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
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Round = Callable[[Tensor], Tensor]
ROTATE = "apply_rotary_pos_emb"


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
    found = {type(m).__module__ for path, m in model.named_modules() if path.endswith("attn")}
    return [code for name in sorted(found) if hasattr(code := sys.modules[name], ROTATE)]


@contextmanager
def attributes(places: list[tuple[Any, str]], change: Callable[[Any], Any]) -> Iterator[None]:
    """Change attributes of objects, and restore them afterwards."""
    kept = [getattr(place, name) for place, name in places]
    try:
        for (place, name), before in zip(places, kept, strict=True):
            setattr(place, name, change(before))
        yield
    finally:
        for (place, name), before in zip(places, kept, strict=True):
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
    found, scaling = ROPE_INIT_FUNCTIONS["yarn"](config, tables[0].inv_freq.device)
    with attributes([(m, "inv_freq") for m in tables], lambda _: found):
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


class _Attending(TorchFunctionMode):
    """Changes the arguments of torch's attention."""

    def changed(self, args: tuple[Any, ...], given: dict[str, Any]) -> Tensor:
        raise NotImplementedError

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            return self.changed(args, dict(kwargs or {}))
        return func(*args, **(kwargs or {}))


class Cached(_Attending):
    """Rounds keys and values as a cache would hold them, on their way into attention."""

    def __init__(self, rounded: Round) -> None:
        super().__init__()
        self._rounded = rounded

    def changed(self, args: tuple[Any, ...], given: dict[str, Any]) -> Tensor:
        query, key, value, *rest = args
        return scaled_dot_product_attention(query, self._rounded(key), self._rounded(value), *rest, **given)


class Windowed(_Attending):
    """Hides from attention what lies further back than a window, which includes the token itself."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self._window = window

    def changed(self, args: tuple[Any, ...], given: dict[str, Any]) -> Tensor:
        seen, back = _seen(args, given)
        # A padded query sees itself, so that no row of the softmax is empty.
        given |= {"attn_mask": (seen & (back < self._window)) | (back == 0), "is_causal": False}
        return scaled_dot_product_attention(*args, **given)


class AttentionScaled(_Attending):
    """Multiplies the scale of attention."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor

    def changed(self, args: tuple[Any, ...], given: dict[str, Any]) -> Tensor:
        scale = given.get("scale") or args[0].shape[-1] ** -0.5
        return scaled_dot_product_attention(*args, **given | {"scale": scale * self._factor})


class AttentionCapped(_Attending):
    """Caps attention's scores softly, at `cap * tanh(score / cap)`."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        self._cap = cap

    def changed(self, args: tuple[Any, ...], given: dict[str, Any]) -> Tensor:
        query, key, value = args
        seen, back = _seen(args, given)
        if given.get("enable_gqa"):
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scale = given.get("scale") or query.shape[-1] ** -0.5
        scores = self._cap * torch.tanh(query @ key.mT * scale / self._cap)
        found: Tensor = scores.masked_fill(~(seen | (back == 0)), -math.inf).softmax(-1) @ value
        return found


class RoundedInputs(TorchFunctionMode):
    """Rounds the inputs of the chosen linear layers, token by token."""

    def __init__(self, chosen: Mapping[int, str], rounded: Round) -> None:
        super().__init__()
        self._chosen, self._rounded = chosen, rounded

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is linear and id(args[1]) in self._chosen:
            args = (self._rounded(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def _seen(args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return which keys each query sees, and how far back the keys lie."""
    query, key, _ = args
    at = torch.arange(key.shape[-2], device=key.device)
    back = at[-query.shape[-2] :, None] - at
    seen = back >= 0
    mask = given.get("attn_mask")
    if mask is not None:
        seen = seen & (mask if mask.dtype == torch.bool else mask == 0)
    return seen, back
