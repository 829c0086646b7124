"""Log-probabilities of sampled tokens over their support S, the tokens that truncation kept, with their gradient.

    log pi_S(y) = z_y / T - log sum_{v in S} exp(z_v / T)

Forward and backward take tokens in chunks and read only the logits of S. Apart from the inputs and their gradient, no tensor has
the vocabulary's size.

Shapes: N tokens, n tokens of a chunk, K ids of its widest position, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mismatch_ext.errors import NonFiniteLogprobError, RecordError
from mismatch_ext.sampling_mask.support import TokenSupport

# Elements of a chunk's largest temporary: 16 MiB in float32.
CHUNK = 1 << 22
# A chunk of positions: their slice, the ids, True where there is an id, and the sampled token's column.
_Chunk = tuple[slice, Tensor, Tensor, Tensor]


def support_logprobs(logits: Tensor, tokens: Tensor, support: TokenSupport, *, temperature: float = 1.0) -> Tensor:
    """Return log pi_S of sampled tokens from a model's logits.

    Args:
        logits: `[N, V]` or `[B, T, V]`, any float dtype, with gradient; a slice is read in place.
        tokens: The sampled ids `[N]` or `[B, T]`, int64.
        support: The ids that each token was sampled from, N or B * T positions, row after row.
        temperature: Divides the logits first.

    Returns:
        Nats, in the shape of `tokens`, float32 (float64 for float64 logits), never positive; positions without ids have the value
        0 and no gradient.

    Raises:
        RecordError: Shapes do not fit, or a token is not in its support; names the position.
        NonFiniteLogprobError: A logit of the support is NaN or infinite.
    """
    fits = logits.shape[:-1] == tokens.shape and logits.dim() in (2, 3) and logits.shape[-1] >= support.vocabulary
    if not (fits and len(support) == tokens.numel() and logits.is_floating_point() and temperature > 0):
        raise RecordError(
            f"logits {list(logits.shape)} of {logits.dtype}, tokens {list(tokens.shape)}, sampling masks of {len(support)} "
            f"positions over {support.vocabulary} tokens, temperature {temperature}: they must be [N, V] or [B, T, V], [N] or "
            "[B, T], one position per token over V or fewer, and > 0."
        )
    _check_inside(tokens.reshape(-1), support)
    found: Tensor = _FromLogits.apply(logits, tokens, support, float(temperature))
    return _finite(found)


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    support: TokenSupport,
    *,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Return log pi_S of sampled tokens from the inputs of a model's output projection, without all logits.

    Only the logits of S are computed, from the rows of the projection for S: scale * (h . w_v + b_v), then
    softcap * tanh(z / softcap), then z / temperature. Under autocast, the products are computed in autocast's dtype, everything
    after them in float32.

    Args:
        hidden: The last hidden states `[N, H]`, with gradient.
        weight: The projection `[V, H]`, with gradient.
        bias: `[V]`, or None.
        tokens: The sampled ids `[N]`, int64.
        support: The ids that each token was sampled from, N positions.
        temperature: Divides the logits last.
        scale: Multiplies the logits first.
        softcap: Bound of capped logits; None means no cap.

    Returns:
        Nats `[N]`, float32 (float64 for float64 states); positions without ids have the value 0 and no gradient.

    Raises:
        RecordError: Shapes do not fit, or a token is not in its support; names the position.
        NonFiniteLogprobError: A logit of the support is NaN or infinite.
    """
    fits = hidden.dim() == 2 and hidden.shape[:1] == tokens.shape and len(weight) >= support.vocabulary
    if not (fits and len(support) == len(tokens) and temperature > 0):
        raise RecordError(
            f"hidden states {list(hidden.shape)}, projection {list(weight.shape)}, tokens {list(tokens.shape)}, sampling masks "
            f"of {len(support)} positions over {support.vocabulary} tokens, temperature {temperature}: they must be [N, H], "
            "[V, H], [N], N positions over V or fewer, and > 0."
        )
    _check_inside(tokens, support)
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    found: Tensor = _FromHead.apply(
        hidden, weight, bias, tokens, support, (float(scale), softcap, float(temperature)), dtype
    )
    return _finite(found)


class _FromLogits(torch.autograd.Function):
    """Gathers the support's logits, forward and backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, support: TokenSupport, temperature: float) -> Tensor:
        ctx.save_for_backward(logits, tokens)
        ctx.support, ctx.temperature = support, temperature
        found = torch.zeros(tokens.shape, dtype=_wide(logits.dtype), device=logits.device)
        for index, part in _sequences(tokens, support):
            for rows, ids, held, column in _chunks(tokens[index], part, 1):
                z = logits[index][rows].gather(-1, ids).to(found.dtype) / temperature
                found[index][rows] = _normalised(z, held, column)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        logits, tokens = ctx.saved_tensors
        (outer,) = gradients
        result = torch.zeros_like(logits)
        for index, part in _sequences(tokens, ctx.support):
            for rows, ids, held, column in _chunks(tokens[index], part, 1):
                z = logits[index][rows].gather(-1, ids).to(outer.dtype) / ctx.temperature
                slope = _slope(z, held, column, outer[index][rows]) / ctx.temperature
                # Padding in the rectangle of ids adds 0 to the gradient of id 0.
                result[index][rows].scatter_add_(-1, ids, slope.to(result.dtype))
        return result, None, None, None


class _FromHead(torch.autograd.Function):
    """Multiplies hidden states with the support's rows of the projection, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        support: TokenSupport,
        scaling: tuple[float, float | None, float],
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, tokens)
        ctx.support, ctx.scaling, ctx.dtype = support, scaling, dtype
        found = torch.zeros(tokens.shape, dtype=_wide(hidden.dtype), device=hidden.device)
        for rows, ids, held, column in _chunks(tokens, support, hidden.shape[1]):
            z, _ = _scaled(_products(hidden[rows], weight, bias, ids, dtype).to(found.dtype), scaling)
            found[rows] = _normalised(z, held, column)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens = ctx.saved_tensors
        (outer,) = gradients
        of_hidden, of_weight, of_bias = (
            torch.zeros(one.shape, dtype=outer.dtype, device=one.device) if one is not None and needed else None
            for one, needed in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        )
        for rows, ids, held, column in _chunks(tokens, ctx.support, hidden.shape[1]):
            h = hidden[rows].to(ctx.dtype)
            plain = _products(h, weight, bias, ids, ctx.dtype).to(outer.dtype)
            z, inner = _scaled(plain, ctx.scaling)
            slope = _slope(z, held, column, outer[rows]) * inner
            products = slope.to(ctx.dtype)
            if of_hidden is not None:
                of_hidden[rows] = torch.bmm(products[:, None], weight[ids].to(ctx.dtype))[:, 0].to(outer.dtype)
            if of_weight is not None:
                # As in TRL's kernel, bfloat16 products are summed without rounding them.
                each = products.to(outer.dtype)[..., None] * h.to(outer.dtype)[:, None]
                of_weight.index_add_(0, ids.flatten(), each.flatten(0, 1))
            if of_bias is not None:
                of_bias.index_add_(0, ids.flatten(), slope.flatten())
        found = (
            None if g is None else g.to(one.dtype)
            for g, one in zip((of_hidden, of_weight, of_bias), (hidden, weight, bias), strict=True)
        )
        return (*found, None, None, None, None)


def _products(hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return h . w_v + b_v for the ids of each position `[n, K]`."""
    z = torch.bmm(weight[ids].to(dtype), hidden.to(dtype)[..., None])[..., 0]
    return z if bias is None else z + bias[ids].to(dtype)


def _scaled(z: Tensor, scaling: tuple[float, float | None, float]) -> tuple[Tensor, Tensor | float]:
    """Return the scaled and capped logits, divided by the temperature, and their derivative."""
    scale, softcap, temperature = scaling
    z = z * scale
    if softcap is None:
        return z / temperature, scale / temperature
    bent = torch.tanh(z / softcap)
    return bent * (softcap / temperature), (1 - bent * bent) * (scale / temperature)


def _normalised(z: Tensor, held: Tensor, column: Tensor) -> Tensor:
    """Return z_y - log sum exp z of each position; 0 if the position has no ids."""
    normaliser = z.masked_fill(~held, -torch.inf).logsumexp(-1)
    return torch.where(held[:, 0], z.gather(-1, column[:, None])[:, 0] - normaliser, 0.0)


def _slope(z: Tensor, held: Tensor, column: Tensor, outer: Tensor) -> Tensor:
    """Return outer * (1[v = y] - pi_S(v)); 0 outside of the support."""
    slope = z.masked_fill(~held, -torch.inf).softmax(-1).neg_()
    slope.scatter_add_(-1, column[:, None], torch.ones_like(column, dtype=z.dtype)[:, None])
    return (slope * outer[:, None]).masked_fill_(~held, 0.0)


def _sequences(tokens: Tensor, support: TokenSupport) -> Iterator[tuple[Any, TokenSupport]]:
    """Yield index and support of each sequence, because flattening a slice of a batch of logits would copy all of it."""
    if tokens.dim() == 1:
        yield ..., support
        return
    length = tokens.shape[1]
    for row in range(len(tokens)):
        yield row, support.slice(row * length, (row + 1) * length)


def _chunks(tokens: Tensor, support: TokenSupport, per_id: int) -> Iterator[_Chunk]:
    """Yield chunks of positions whose largest temporary, of `per_id` elements per id, is small."""
    counts = support.counts
    size = max(1, CHUNK // (max(int(counts.max()) if len(counts) else 1, 1) * per_id))
    for first in range(0, len(tokens), size):
        rows = slice(first, min(first + size, len(tokens)))
        if not bool(counts[rows].any()):
            continue
        ids, held = support.rows(rows.start, rows.stop, tokens.device)
        yield rows, ids, held, ((ids == tokens[rows][:, None]) & held).long().argmax(-1)


def _check_inside(tokens: Tensor, support: TokenSupport) -> None:
    support.check_sampled(tokens.tolist(), (support.counts > 0).tolist(), "of this batch, flattened")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _finite(found: Tensor) -> Tensor:
    if not bool(torch.isfinite(found).all()):
        place = [int(x) for x in (~torch.isfinite(found.detach())).nonzero()[0]]
        raise NonFiniteLogprobError(
            f"the log-probability over the sampling mask at position {place} is {float(found[tuple(place)])}: a logit of the "
            "tokens that were left is NaN or infinite."
        )
    return found
