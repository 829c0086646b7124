"""Sampling-mask replay: log-probabilities over only the tokens that top-p, top-k and min-p kept (DeepSeek-V3.2).

These tokens are the support S. An engine that truncates samples from pi_S(y) = pi(y) / sum_{v in S} pi(v). If the trainer scores
pi(y), the importance ratio is the mass of S even where both sides agree. If the trainer scores pi_S(y) over the same S, it is 1.

    log pi_S(y) = z_y / T - log sum_{v in S} exp(z_v / T)

Forward and backward take tokens in chunks and read only the logits of S. Apart from the inputs and their gradient, no tensor has
the vocabulary's size.

Shapes: N tokens, T positions of a response, M ids over all positions, K ids of the widest position, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from mismatch_ext.errors import NonFiniteLogprobError, RecordError

# Elements of a chunk's largest temporary: 16 MiB in float32.
CHUNK = 1 << 22
# Positions that are read together; before that, all that the engine reported about them is kept.
PENDING = 64
# A chunk of positions: their slice, the ids, True where there is an id, and the sampled token's column.
_Chunk = tuple[slice, Tensor, Tensor, Tensor]


# The ids that each position was sampled from.


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenSupport:
    """The token ids from which each position was sampled, after top-p, top-k and min-p (DeepSeek-V3.2, arXiv 2512.02556).

    An id takes 2 bytes for a vocabulary of up to 32,768 tokens and 4 bytes above; a position takes 8 more. A bitmask would take
    V/8 bytes per position: 19 kB for 152,000 tokens, where 64 ids take 264 bytes.

    Args:
        ids: Ids of all positions in order `[M]`, int16 or int32, ascending within a position.
        offsets: Index in `ids` of the first id of each position, then M `[T+1]`, int64. A position without ids was not sampled,
            for example a tool's token or padding.
        vocabulary: V, the number of tokens that have logits.
    """

    ids: Tensor
    offsets: Tensor
    vocabulary: int

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]], vocabulary: int, name: str = "") -> TokenSupport:
        """Store the ids of each position, in any order; none for a position that was not sampled. `name` is the response's.

        Raises RecordError for an id that is not in the vocabulary, or twice at one position.
        """
        counts = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        flat = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
        return cls.from_places(flat, torch.repeat_interleave(counts), len(rows), vocabulary, partial(_named, name))

    @classmethod
    def from_places(
        cls, ids: Tensor, places: Tensor, positions: int, vocabulary: int, named: Callable[[int], str]
    ) -> TokenSupport:
        """Store ids `[M]` with the position of each `[M]`, in any order; `named` names a position. Raises as `from_lists`."""
        for bad in ((ids < 0) | (ids >= vocabulary)).nonzero()[:1, 0].tolist():
            raise RecordError(
                f"{named(int(places[bad]))}: its sampling mask lists id {int(ids[bad])}; allowed: 0 to {vocabulary - 1}."
            )
        keys = (places * vocabulary + ids).sort().values
        for twice in (keys.diff() == 0).nonzero()[:1, 0].tolist():
            raise RecordError(f"{named(int(keys[twice]) // vocabulary)}: its sampling mask lists an id twice.")
        offsets = torch.zeros(positions + 1, dtype=torch.int64)
        offsets[1:] = torch.bincount(places, minlength=positions).cumsum(0)
        return cls(ids=(keys % vocabulary).to(_narrow(vocabulary)), offsets=offsets, vocabulary=vocabulary)

    @classmethod
    def empty(cls, positions: int, vocabulary: int) -> TokenSupport:
        """Return positions without ids, at which nothing was sampled."""
        return cls.from_lists([()] * positions, vocabulary)

    @classmethod
    def from_top(
        cls,
        top_ids: Sequence[Sequence[int]],
        top_logprobs: Sequence[Sequence[float | None]],
        *,
        asked: int,
        vocabulary: int,
        name: str = "",
    ) -> TokenSupport:
        """Return the support from the most likely tokens of each position, and their log-probabilities after truncation.

        The tokens include the sampled one, and `asked` others were asked for. Those that were cut off have -inf (vLLM's
        `processed_logprobs`). If one was, all that were kept are among the reported ones, and the support is exactly the
        engine's. Otherwise it may have more, which raises RecordError.
        """
        counts = torch.tensor([len(ids) for ids in top_ids], dtype=torch.int64)
        ids = torch.tensor([token for position in top_ids for token in position], dtype=torch.int64)
        values = [math.nan if value is None else value for position in top_logprobs for value in position]
        left = torch.tensor(values, dtype=torch.float64) > -math.inf  # False for NaN
        place = torch.repeat_interleave(counts)
        cut = torch.bincount(place[~left], minlength=len(counts)) > 0
        return _support_of_left(ids[left], place[left], cut, asked, vocabulary, partial(_named, name))

    @classmethod
    def joined(cls, parts: Sequence[TokenSupport]) -> TokenSupport:
        """Return the positions of several supports over one vocabulary, one after the other."""
        counts = torch.cat([torch.zeros(1, dtype=torch.int64), *(part.counts for part in parts)])
        return cls(
            ids=torch.cat([part.ids for part in parts]), offsets=counts.cumsum(0), vocabulary=parts[0].vocabulary
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> Tensor:
        """Number of ids per position `[T]`, int64."""
        return self.offsets.diff()

    def slice(self, start: int, stop: int) -> TokenSupport:
        """Return the positions from `start` up to, not including, `stop`."""
        offsets = self.offsets[start : stop + 1]
        ids = self.ids[int(offsets[0]) : int(offsets[-1])]
        return TokenSupport(ids=ids, offsets=offsets - offsets[0], vocabulary=self.vocabulary)

    def padded(self, length: int) -> TokenSupport:
        """Return `length` positions: the first ones of this support, then empty ones if it has too few."""
        if length <= len(self):
            return self.slice(0, length)
        return TokenSupport.joined([self, TokenSupport.empty(length - len(self), self.vocabulary)])

    def rows(self, start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return ids of some positions as a rectangle `[stop - start, K]`, int64, and True where it has an id, bool."""
        counts = self.counts[start:stop].to(device)
        width = max(int(counts.max()), 1) if len(counts) else 1
        filled = torch.arange(width, device=device) < counts[:, None]
        ids = torch.zeros(filled.shape, dtype=torch.int64, device=device)
        ids[filled] = self.ids[int(self.offsets[start]) : int(self.offsets[stop])].to(device).long()
        return ids, filled

    def check_sampled(
        self, tokens: Sequence[int] | NDArray[Any], mask: Sequence[bool] | NDArray[Any], name: str
    ) -> None:
        """Raise RecordError if a sampled token of the response `[T]`, True in `mask`, is not in the support of its position."""
        if len(tokens) != len(self):
            raise RecordError(
                f"rollout {name}: {len(tokens)} response tokens and sampling masks of {len(self)} positions; one of each is "
                "needed."
            )
        # In numpy, whose calls cost a third of torch's: a batch has hundreds of responses of a few dozen tokens.
        sampled = np.asarray(tokens, dtype=np.int64)
        inside = np.zeros(len(self), dtype=bool)
        offsets = self.offsets.numpy()
        place = np.repeat(np.arange(len(self)), offsets[1:] - offsets[:-1])
        inside[place[self.ids.numpy() == sampled[place]]] = True
        if (outside := np.asarray(mask, dtype=bool) & ~inside).any():
            token = int(outside.argmax())
            count = int(self.counts[token])
            raise RecordError(
                f"rollout {name}, token {token} (id {tokens[token]}): not among the {count} tokens of its sampling mask, so "
                "that it could not have been sampled; masks and tokens are of different requests or positions."
            )


def _narrow(vocabulary: int) -> torch.dtype:
    return torch.int16 if vocabulary <= 1 << 15 else torch.int32


# What an engine's most likely tokens tell of them.


class LeftTokens:
    """The support of each position of a response, taken from an engine's arrays as it samples, without objects per token."""

    def __init__(self) -> None:
        self._pending: list[tuple[NDArray[Any], NDArray[Any]]] = []
        # Ids of the most likely tokens that were kept, their number, whether any was cut off, and the sampled token.
        self._read: list[tuple[Any, ...]] = []

    def take(self, ids: NDArray[Any], logprobs: NDArray[Any]) -> None:
        """Add positions: ids `[positions, 1 + asked]`, the sampled one first, and log-probabilities, NaN or -inf if cut off."""
        self._pending.append((ids, logprobs))
        if len(self._pending) == PENDING:
            self._read.append(_read_of(self._pending))
            self._pending = []

    def __len__(self) -> int:
        read = sum(len(cut) for _, _, cut, _ in self._read)
        return read + sum(len(ids) for ids, _ in self._pending)

    def support(self, *, asked: int, vocabulary: int, name: str = "") -> TokenSupport:
        """Return the support of the positions so far; arguments and errors as for `TokenSupport.from_top`."""
        return _support_of_read(_read_of_all([self]), asked, vocabulary, partial(_named, name))


def _read_of(pending: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> tuple[Any, ...]:
    """Return what is kept of some positions as `LeftTokens.take` was given them: the columns of its `_read`."""
    ids, logprobs = (np.concatenate(columns) for columns in zip(*pending, strict=True))
    left = logprobs > -math.inf  # False for NaN
    likeliest, counts = ids[:, 1:][left[:, 1:]], left[:, 1:].sum(1, dtype=np.int32)
    sampled = np.where(left[:, 0], ids[:, 0], -1)
    return likeliest.astype(np.int32), counts, ~left.all(1), sampled.astype(np.int32)


def _read_of_all(responses: Sequence[LeftTokens]) -> list[tuple[Any, ...]]:
    """Return what is known of the positions of some responses, in order, in parts that may span several responses."""
    parts: list[tuple[Any, ...]] = []
    waiting: list[tuple[NDArray[Any], NDArray[Any]]] = []
    for response in responses:
        if response._read and waiting:
            parts.append(_read_of(waiting))
            waiting = []
        parts += response._read
        waiting += response._pending
    if waiting:
        parts.append(_read_of(waiting))
    return parts


def supports_of(responses: Sequence[LeftTokens], *, asked: int, vocabulary: int) -> list[TokenSupport]:
    """Return what `LeftTokens.support` returns of each response, which errors name by its index, from one pass over all."""
    ends = list(accumulate(map(len, responses), initial=0))

    def named(position: int) -> str:
        row = bisect_right(ends, position) - 1
        return _named(str(row), position - ends[row])

    joined = _support_of_read(_read_of_all(responses), asked, vocabulary, named)
    ids, offsets = joined.ids.numpy(), joined.offsets.numpy()
    supports = []
    for first, last in pairwise(ends):
        of_row = offsets[first : last + 1]
        # Copies, because a view would hold, and pickle, the ids of all.
        own = torch.from_numpy(ids[of_row[0] : of_row[-1]].copy())
        supports.append(TokenSupport(ids=own, offsets=torch.from_numpy(of_row - of_row[0]), vocabulary=vocabulary))
    return supports


def _named(name: str, token: int) -> str:
    return f"rollout {name}, token {token}"


def _support_of_read(
    read: Sequence[tuple[Any, ...]], asked: int, vocabulary: int, named: Callable[[int], str]
) -> TokenSupport:
    if not read:
        return TokenSupport.empty(0, vocabulary)
    ids, counts, cut, sampled = (torch.from_numpy(np.concatenate(column)) for column in zip(*read, strict=True))
    place = torch.repeat_interleave(torch.arange(len(counts)), counts)
    # The sampled token may be less likely than all of the most likely ones.
    besides = sampled >= 0
    besides[place[ids == sampled[place]]] = False
    ids, place = torch.cat([ids, sampled[besides]]), torch.cat([place, besides.nonzero()[:, 0]])
    return _support_of_left(ids, place, cut, asked, vocabulary, named)


def _support_of_left(
    ids: Tensor, place: Tensor, cut: Tensor, asked: int, vocabulary: int, named: Callable[[int], str]
) -> TokenSupport:
    """Return the support from the reported ids that were left `[M]`, the position of each, and whether any was cut off `[T]`."""
    total = torch.bincount(place, minlength=len(cut))
    # If none was cut off, the support may have more tokens, even if the engine reported few.
    unknown = ~(cut & (total < min(asked, vocabulary))) & (total < vocabulary)
    for token in (unknown | (total == 0)).nonzero()[:1, 0].tolist():
        if not unknown[token]:
            raise RecordError(f"{named(token)}: the engine reported no token that could be sampled.")
        raise RecordError(
            f"{named(token)}: at least {int(total[token])} tokens were left to sample from, and the engine was asked for "
            f"{asked}: what is left is not known. Raise mismatch.sampling_mask.max_support above {asked}, or truncate harder "
            "(top_k)."
        )
    return TokenSupport.from_places(ids, place, len(cut), vocabulary, named)


# Log-probabilities over them, with their gradient.


def support_logprobs(logits: Tensor, tokens: Tensor, support: TokenSupport, *, temperature: float = 1.0) -> Tensor:
    """Return log pi_S of sampled tokens from a model's logits: the policy over the ids that were left to sample from.

        log pi_S(t) = z_t - log sum_{s in S_t} exp(z_s),   z = logits / temperature       (DeepSeek-V3.2, arXiv 2512.02556)

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
    logprobs: Tensor = _FromLogits.apply(logits, tokens, support, float(temperature))
    return _finite(logprobs)


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
    expect_finite: bool = True,
) -> Tensor:
    """Return log pi_S of sampled tokens `[N]` from hidden states `[N, H]` and the output projection `[V, H]`, with gradient.

    Only the logits of S are computed: scale * (h . w_v + b_v), then softcap * tanh(z / softcap), then z / temperature. Under
    autocast, the products are computed in its dtype, everything after them in float32. Errors are those of `support_logprobs`;
    without `expect_finite`, values that are not finite are returned.
    """
    _check_inside(tokens, support)
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    logprobs: Tensor = _FromHead.apply(
        hidden, weight, bias, tokens, support, (float(scale), softcap, float(temperature)), dtype
    )
    return _finite(logprobs) if expect_finite else logprobs


class _FromLogits(torch.autograd.Function):
    """Gathers the support's logits, forward and backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, support: TokenSupport, temperature: float) -> Tensor:
        ctx.save_for_backward(logits, tokens)
        ctx.support, ctx.temperature = support, temperature
        logprobs = torch.zeros(tokens.shape, dtype=_wide(logits.dtype), device=logits.device)
        for index, part in _sequences(tokens, support):
            for rows, ids, filled, column in _chunks(tokens[index], part, 1):
                z = logits[index][rows].gather(-1, ids).to(logprobs.dtype) / temperature
                logprobs[index][rows] = _normalized(z, filled, column)
        return logprobs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        logits, tokens = ctx.saved_tensors
        (outer,) = gradients
        result = torch.zeros_like(logits)
        for index, part in _sequences(tokens, ctx.support):
            for rows, ids, filled, column in _chunks(tokens[index], part, 1):
                z = logits[index][rows].gather(-1, ids).to(outer.dtype) / ctx.temperature
                slope = _slope(z, filled, column, outer[index][rows]) / ctx.temperature
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
        logprobs = torch.zeros(tokens.shape, dtype=_wide(hidden.dtype), device=hidden.device)
        for rows, ids, filled, column in _chunks(tokens, support, hidden.shape[1]):
            plain = _products(hidden[rows].to(dtype), _rows_of(weight, ids, dtype), bias, ids)
            z, _ = _scaled(plain.to(logprobs.dtype), scaling)
            logprobs[rows] = _normalized(z, filled, column)
        return logprobs

    @staticmethod
    def backward(ctx: Any, *outers: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens = ctx.saved_tensors
        (outer,) = outers
        of_hidden, of_weight, of_bias = (
            torch.zeros(x.shape, dtype=outer.dtype, device=x.device) if x is not None and needed else None
            for x, needed in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        )
        for rows, ids, filled, column in _chunks(tokens, ctx.support, hidden.shape[1]):
            h, of_ids = hidden[rows].to(ctx.dtype), _rows_of(weight, ids, ctx.dtype)
            plain = _products(h, of_ids, bias, ids).to(outer.dtype)
            z, inner = _scaled(plain, ctx.scaling)
            slope = _slope(z, filled, column, outer[rows]) * inner
            products = slope.to(ctx.dtype)
            if of_hidden is not None:
                of_hidden[rows] = torch.bmm(products[:, None], of_ids)[:, 0].to(outer.dtype)
            if of_weight is not None:
                # As in TRL's kernel, bfloat16 products are summed without rounding them.
                each = products.to(outer.dtype)[..., None] * h.to(outer.dtype)[:, None]
                of_weight.index_add_(0, ids.flatten(), each.flatten(0, 1))
            if of_bias is not None:
                of_bias.index_add_(0, ids.flatten(), slope.flatten())
        gradients = tuple(
            None if g is None else g.to(x.dtype)
            for g, x in zip((of_hidden, of_weight, of_bias), (hidden, weight, bias), strict=True)
        )
        return (*gradients, None, None, None, None)


def _rows_of(weight: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows of the projection for the ids of each position `[n, K, H]`; indexing takes three times as long on a CPU."""
    if len(weight) <= ids.numel():
        weight = weight.to(dtype)  # fewer elements to convert than the rows that are taken
    return F.embedding(ids, weight).to(dtype)


def _products(hidden: Tensor, rows: Tensor, bias: Tensor | None, ids: Tensor) -> Tensor:
    """Return h . w_v + b_v for the ids of each position `[n, K]`, given the rows w_v of the projection."""
    z = torch.bmm(rows, hidden[..., None])[..., 0]
    return z if bias is None else z + bias[ids].to(rows.dtype)


def _scaled(z: Tensor, scaling: tuple[float, float | None, float]) -> tuple[Tensor, Tensor | float]:
    """Return the scaled and capped logits, divided by the temperature, and their derivative."""
    scale, softcap, temperature = scaling
    z = z * scale
    if softcap is None:
        return z / temperature, scale / temperature
    bent = torch.tanh(z / softcap)
    return bent * (softcap / temperature), (1 - bent * bent) * (scale / temperature)


def _normalized(z: Tensor, filled: Tensor, column: Tensor) -> Tensor:
    """Return z_y - log sum exp z of each position; 0 if the position has no ids."""
    normalizer = z.masked_fill(~filled, -torch.inf).logsumexp(-1)
    return torch.where(filled[:, 0], z.gather(-1, column[:, None])[:, 0] - normalizer, 0.0)


def _slope(z: Tensor, filled: Tensor, column: Tensor, outer: Tensor) -> Tensor:
    """Return outer * (1[v = y] - pi_S(v)); 0 outside of the support."""
    slope = z.masked_fill(~filled, -torch.inf).softmax(-1).neg_()
    slope.scatter_add_(-1, column[:, None], torch.ones_like(column, dtype=z.dtype)[:, None])
    return (slope * outer[:, None]).masked_fill_(~filled, 0.0)


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
        ids, filled = support.rows(rows.start, rows.stop, tokens.device)
        yield rows, ids, filled, ((ids == tokens[rows][:, None]) & filled).long().argmax(-1)


def _check_inside(tokens: Tensor, support: TokenSupport) -> None:
    support.check_sampled(tokens.tolist(), (support.counts > 0).tolist(), "of this batch, flattened")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _finite(logprobs: Tensor) -> Tensor:
    if not bool(torch.isfinite(logprobs).all()):
        place = [int(x) for x in (~torch.isfinite(logprobs.detach())).nonzero()[0]]
        raise NonFiniteLogprobError(
            f"the log-probability over the sampling mask at position {place} is {float(logprobs[tuple(place)])}: a logit of the "
            "tokens that were left is NaN or infinite."
        )
    return logprobs
