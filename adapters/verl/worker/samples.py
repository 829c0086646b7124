"""What replay reads off verl's batches: routes, names and lengths of samples."""

from __future__ import annotations

from typing import Any

import torch
from mismatch_ext.adapters.verl.worker.replay import FIELD, TOKENS, Rows
from torch import Tensor
from verl.utils import tensordict_utils as tu

from mismatch_ext.errors import RoutingError
from mismatch_ext.routing.trace import Span

ALTERED = (
    "request {}: its token ids are others than those that its routes were recorded of ({} of {} samples): input_ids were changed "
    "without routed_experts, or routes were moved without their samples. Give an update the tokens that were sampled."
)


def lengths(data: Any) -> list[int]:
    """Return the tokens of each sample."""
    return [int(count) for count in data["input_ids"].offsets().diff().tolist()]


def tokens(data: Any) -> list[Tensor]:
    """Return the token ids of each sample `[T]`, int32, on the CPU."""
    return [ids.to(device="cpu", dtype=torch.int32) for ids in data["input_ids"].unbind()]


def altered(data: Any) -> list[int]:
    """Return the samples that have a loss, but other token ids than their routes were recorded of.

    With R2 the recording says which ids these were. With R3 they are the agent loop's prompt and response, which came with the
    routes; where these fields are missing or padded, there is nothing to compare `input_ids` with.
    """
    field, prompts, responses = (data.get(name, None) for name in (TOKENS, "prompts", "responses"))
    if field is not None:
        known = list(field.unbind())
    elif prompts is not None and responses is not None and prompts.is_nested and responses.is_nested:
        known = [torch.cat(pair) for pair in zip(prompts.unbind(), responses.unbind(), strict=True)]
    else:
        return []
    pairs = zip(known, tokens(data), needed(data), strict=True)
    return [row for row, (ids, own, rows) in enumerate(pairs) if rows and not torch.equal(ids.cpu().to(own.dtype), own)]


def rows_of(data: Any, padding: int) -> Rows:
    """Return how the engine lays out a micro-batch.

    Args:
        data: The micro-batch.
        padding: Tokens that follow a packed row.
    """
    packed = bool(tu.get_non_tensor_data(data=data, key="use_remove_padding", default=True))
    return Rows(lengths=tuple(lengths(data)), packed=packed, padding=padding if packed else 0)


def routes(data: Any) -> list[Any]:
    """Return the routes of each sample as they came `[rows, layers, K]`; None where a sample has none.

    Raises:
        RoutingError: The batch has no such field.
    """
    field = data.get(FIELD, None)
    if field is None:
        raise RoutingError(
            f"the batch of {len(data)} samples has no {FIELD!r}, so it cannot be replayed: with R3 the rollout engine returned "
            "no routing for one of them or more (rollout.enable_rollout_routing_replay=True is needed); with R2 no pass computed "
            "old log-probabilities before this one."
        )
    return list(
        field.unbind() if isinstance(field, Tensor) else field.tolist()
    )  # a stack of objects where some are None


def needed(data: Any) -> list[int]:
    """Return how many rows of each sample, from the first on, its loss depends on: none where it has no loss.

    The token at position t is predicted from the row of position t - 1, and through attention from all before it.
    """
    prompts = data.get("prompts", None)
    known = prompts is not None and prompts.is_nested  # padded prompts do not say where a response begins
    starts = prompts.offsets().diff().tolist() if known else [None] * len(data)
    found = []
    for mask, start, tokens in zip(data["loss_mask"].unbind(), starts, lengths(data), strict=True):
        trained = mask.nonzero()
        if not len(trained):
            found.append(0)
        else:
            found.append(tokens - 1 if start is None else int(start + trained[-1]))
    return found


def versions(data: Any) -> list[Span | None]:
    """Return the versions of the weights that sampled each sample, as verl's servers stamp them; None when unknown."""
    found = data.get("extra_fields", None)
    rows = found.tolist() if hasattr(found, "tolist") else found
    if not isinstance(rows, (list, tuple)) or len(rows) != len(data):
        return [None] * len(data)
    pairs = ((row.get("min_global_steps"), row.get("max_global_steps")) for row in rows)
    return [None if first is None or last is None else (int(first), int(last)) for first, last in pairs]


def names(data: Any, rank: int) -> list[str]:
    """Return what to call each sample in messages that begin with "request"."""
    found = [f"{index} of rank {rank}'s mini-batch" for index in range(len(data))]
    uids = data.get("uid", None)
    uids = uids.tolist() if hasattr(uids, "tolist") else uids
    if isinstance(uids, (list, tuple)) and len(uids) == len(found):
        return [f"{name} (uid {uid})" for name, uid in zip(found, uids, strict=True)]
    return found
