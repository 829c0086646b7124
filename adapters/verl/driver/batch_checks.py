"""What the driver looks at in fresh rollouts before anything is learned from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from mismatch_ext.adapters.verl.measure import CHUNK, EXTRA, MASK, sampled_rows
from mismatch_ext.adapters.verl.replay import FIELD, TOKENS
from mismatch_ext.adapters.verl.rollout.client import READ, SAMPLED, SETTINGS
from mismatch_ext.adapters.verl.rollout.digests import numbers, without_digests
from numpy.typing import NDArray
from torch import Tensor
from verl.trainer.ppo.metric_utils import RolloutMoELoadBalanceMetricsAccumulator

from mismatch_ext.config import RoutingConfig
from mismatch_ext.errors import RecordError, RoutingError
from mismatch_ext.names import PREFIX
from mismatch_ext.rollout import SamplingSettings


def versions(batch: Any) -> list[tuple[str, int | None, int | None]]:
    """Return each sampled rollout's key, and the versions of the weights at its first and last token; None when unknown."""
    rows = ((batch.keys[row], batch.tags[row]) for row in sampled_rows(batch))
    return [(key, tag.get("min_global_steps"), tag.get("max_global_steps")) for key, tag in rows]


def check_routes(batch: Any, step: int) -> None:
    """Refuse and name rollouts without routes: with one of them in a batch, TransferQueue returns no routes for any rollout."""
    if not _lack_routes(list(batch.keys), batch.partition_id):
        return
    keys = [batch.keys[row] for row in sampled_rows(batch)]
    if lost := [key for key in keys if _lack_routes([key], batch.partition_id)]:
        named = ", ".join(lost[:5]) + (", ..." if len(lost) > 5 else "")
        raise RoutingError(
            f"{len(lost)} of {len(keys)} rollouts of step {step} came without routing ({named}), and R3 cannot replay them. The "
            "rollout server records routing, so look at the agent loop: it must pass on `routed_experts` of each answer."
        )


def check_settings(batch: Any, step: int, expected: SamplingSettings) -> None:
    """Refuse rollouts that were sampled with other settings than the trainer scores them by; raises RecordError."""
    scored = {name: getattr(expected, name) for name in READ}
    for key, extra in _extra_fields(batch):
        for settings in extra.get(SETTINGS, ()):
            for name, value in settings.items():
                keeps_all = value <= 0 and scored[name] <= 0  # as top_k, 0 and -1 are the same
                if value == scored[name] or keeps_all:
                    continue
                raise RecordError(
                    f"rollout {key} of step {step} was sampled with {name}={value:g}, and the trainer scores it with "
                    f"actor_rollout_ref.rollout.{name}={scored[name]:g}. Let the agent loop pass on the settings that verl gives "
                    "it."
                )


def check_tokens(batch: Any, step: int, metrics: MutableMapping[str, Any]) -> None:
    """Refuse rollouts with a token of the policy's that the engine has not sampled after the tokens before; raises RecordError.

    Puts the share of such rollouts and tokens into `metrics` first. Rollouts of which nobody noted it are left out.
    """
    forked: list[tuple[str, int]] = []
    policy = misplaced = 0
    noted = {key: extra[SAMPLED] for key, extra in _extra_fields(batch) if extra.get(SAMPLED)}
    keys = list(noted)
    for first in range(0, len(keys), CHUNK):
        part = keys[first : first + CHUNK]
        names = ["prompts", "responses", MASK]
        data = tq.kv_batch_get(keys=part, partition_id=batch.partition_id, select_fields=names)
        for key, prompt, response, mask in zip(part, *(data[name].unbind() for name in names), strict=True):
            tokens = torch.cat([prompt, response]).numpy()
            missing = unsampled(tokens, len(prompt), mask.bool().numpy(), noted[key])
            policy += int(mask.bool().sum())
            misplaced += len(missing)
            if len(missing):
                forked.append((key, int(missing[0])))
    if noted:
        metrics[f"{PREFIX}turns/forked_frac"] = len(forked) / len(noted)
        metrics[f"{PREFIX}turns/misplaced_frac"] = misplaced / policy if policy else 0.0
    if forked:
        key, token = forked[0]
        raise RecordError(
            f"rollout {key} of step {step}, token {token}: the tokens to be trained on are not those that the engine sampled, in "
            f"{len(forked)} of {len(noted)} rollouts. Let the agent loop keep the engine's token ids, and set response_mask to 0 "
            "for all others."
        )


def unsampled(
    tokens: Sequence[int] | NDArray[Any],
    prompt: int,
    mask: Sequence[bool] | NDArray[Any],
    sampled: Sequence[Sequence[int]],
) -> NDArray[np.intp]:
    """Return the places in the response of the policy's tokens that no request has sampled.

    Args:
        tokens: Prompt and response.
        prompt: Number of the prompt's tokens.
        mask: Whether each token of the response counts as the policy's.
        sampled: Of each request the numbers of tokens before and after it, and their digests, as `SAMPLED` has them.
    """
    found = numbers(tokens)
    known = np.zeros(len(tokens), bool)
    for before, digest_before, after, digest_after in sampled:
        if before > len(tokens) or found[before - 1] != digest_before:
            continue
        # A row may end inside an answer, of whose beginning there is no digest.
        if after > len(tokens) or found[after - 1] == digest_after:
            known[before:after] = True
    return np.flatnonzero(np.asarray(mask) & ~known[prompt:])


def _extra_fields(batch: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each sampled rollout's key and its `extra_fields`."""
    keys = [batch.keys[row] for row in sampled_rows(batch)]
    for first in range(0, len(keys), CHUNK):
        part = keys[first : first + CHUNK]
        data = tq.kv_batch_get(keys=part, partition_id=batch.partition_id, select_fields=[EXTRA])
        fields = data.pop(EXTRA, None)
        if fields is not None:
            yield from ((key, extra or {}) for key, extra in zip(part, fields.tolist(), strict=True))


def _lack_routes(keys: Sequence[str], partition: str) -> bool:
    return FIELD not in tq.get_client().kv_retrieve_meta(list(keys), partition).field_names


@contextmanager
def without_routes(batch: Any, routing: RoutingConfig | None) -> Iterator[None]:
    """Keep the routes of a batch from a pass that does not replay them: they are most of its bytes."""
    if routing is None:
        yield
        return
    given = batch.fields
    known = given or tq.get_client().kv_retrieve_meta(list(batch.keys), batch.partition_id).field_names
    batch.fields = [name for name in known if name not in (FIELD, TOKENS)]
    try:
        yield
    finally:
        batch.fields = given


class ExpertLoads(RolloutMoELoadBalanceMetricsAccumulator):
    """verl's metrics of the experts' load, which it takes of the routes in the driver."""

    def update(self, routed_experts: Tensor | None, *args: Any, **kwargs: Any) -> bool:
        """Count as verl does."""
        given = None if routed_experts is None else without_digests(routed_experts)
        return bool(super().update(given, *args, **kwargs))
