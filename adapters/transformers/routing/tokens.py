"""Find the tokens that a transformers model is called with; only a pass over the trace's tokens is replayed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor, nn

from mismatch_ext.routing.tokens import TokenRows, token_rows

BESIDE = ("pixel_", "image_", "video_", "audio_", "input_features")
"""Beginnings of the names of inputs whose content token ids do not show."""


def pass_tokens(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TokenRows | str:
    """Return the tokens of a forward pass, or why its arguments do not tell them.

    Args:
        module: The decoder, or the module that embeds the tokens for it.
        args: Its positional arguments.
        kwargs: Its named arguments.
    """
    given = dict(zip(_parameters(type(module)), args, strict=False)) | kwargs
    ids, mask, places = (given.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        return "it was given no input_ids [B, S] (embeddings of something else?)"
    if beside := [name for name, value in given.items() if value is not None and name.startswith(BESIDE)]:
        return f"it has inputs beside its token ids ({', '.join(beside)})"
    if mask is not None and not (isinstance(mask, Tensor) and mask.shape == ids.shape):
        return "its attention_mask is not [B, S] as its input_ids are, so which tokens see which is not known"
    # transformers 5.24 calls it `cache`, and takes the old name too.
    caches = [given[name] for name in ("cache", "past_key_values") if given.get(name) is not None]
    cache_of_earlier = caches[0] if caches else None
    if cache_of_earlier is not None and cache_of_earlier.get_seq_length():
        return f"it continues a KV cache of {cache_of_earlier.get_seq_length()} tokens, which may be any"
    if isinstance(places, Tensor) and places.dim() == 3:
        places = places[0]  # the positions of text, in models that count height and width too
    places = places if isinstance(places, Tensor) and places.dim() == 2 else None
    if places is not None and mask is None and _caches(module, given) and bool((places.diff(dim=1) != 1).any()):
        return "its position_ids are those of packed sequences, which see each other with use_cache=True; pass use_cache=False"
    return token_rows(ids, mask, places)


def _caches(module: nn.Module, given: dict[str, Any]) -> bool:
    asked = given.get("use_cache")
    return bool(getattr(getattr(module, "config", None), "use_cache", False) if asked is None else asked)


def _parameters(kind: type[Any]) -> tuple[str, ...]:
    return _names(kind.forward)


@cache
def _names(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]
