"""What the driver looks at in fresh rollouts before anything is learned from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from mismatch_ext.adapters.verl.measure import CHUNK, EXTRA, MASK, BadKeys, sampled_rows
from mismatch_ext.adapters.verl.replay import FIELD, TOKENS
from mismatch_ext.adapters.verl.rollout.client import NEUTRAL, READ, SAMPLED, SETTINGS
from mismatch_ext.adapters.verl.rollout.digests import numbers, without_digests
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.metric_utils import RolloutMoELoadBalanceMetricsAccumulator

from mismatch_ext.bad_rows import FEW
from mismatch_ext.config import RoutingConfig
from mismatch_ext.errors import MismatchError, RecordError, RoutingError
from mismatch_ext.names import PREFIX
from mismatch_ext.rollout import Origins, SamplingSettings


def versions(batch: Any) -> list[tuple[str, int | None, int | None]]:
    """Return each sampled rollout's key, and the versions of the weights at its first and last token; None when unknown."""
    rows = ((batch.keys[row], batch.tags[row]) for row in sampled_rows(batch))
    return [(key, tag.get("min_global_steps"), tag.get("max_global_steps")) for key, tag in rows]


def check_versions(origins: Origins, batch: Any, bad: BadKeys, *, older: bool) -> None:
    """Call rollouts bad that were sampled with other weights than the servers have; with `older`, earlier ones are accepted.

    Raises RecordError if all of them were, because the fault is then none of single rows.
    """
    rows = versions(batch)
    wrong: dict[str, MismatchError] = {}
    for key, first, last in rows:
        try:
            origins.check([(key, first, last)], older=older)
        except MismatchError as error:
            wrong[key] = error
    if len(wrong) == len(rows) >= FEW:
        raise next(iter(wrong.values()))
    for key, fault in wrong.items():
        bad.add(key, "weight_version", f"rollout {key}: {fault}")


def check_routes(batch: Any, step: int, bad: BadKeys, *, acts: bool) -> None:
    """Call rollouts bad that have no routes; raises RoutingError if none has any.

    With one such rollout in a batch, TransferQueue returns routes for no rollout. So if the config acts, those without get zeros,
    which are no expert's: their rows carry no digest of any token.
    """
    if not _lack_routes(list(batch.keys), batch.partition_id):
        return
    keys = [batch.keys[row] for row in sampled_rows(batch)]
    lost = [key for key in keys if _lack_routes([key], batch.partition_id)]
    if not lost:
        return
    if len(lost) == len(keys):
        raise RoutingError(
            f"all {len(keys)} rollouts of step {step} came without routing, and R3 cannot replay them. The rollout server "
            "records routing, so look at the agent loop: it must pass on `routed_experts` of each answer."
        )
    for key in lost:
        message = (
            f"rollout {key} of step {step} came without routing; the agent loop must pass on its `routed_experts`."
        )
        bad.add(key, "routes", message)
    if acts:
        pattern = next(key for key in keys if key not in set(lost))
        # verl fills a batch up with copies of its first row, which lack routes if that row does.
        copies = [key for key in batch.keys if key not in set(keys) and _lack_routes([key], batch.partition_id)]
        _put_empty_routes(batch, [*lost, *copies], pattern)


def _put_empty_routes(batch: Any, keys: list[str], pattern: str) -> None:
    """Put routes of zeros into the queue for rollouts without any, in the layout of another rollout's."""
    partition = batch.partition_id
    (known,) = tq.kv_batch_get(keys=[pattern], partition_id=partition, select_fields=[FIELD])[FIELD].unbind()
    data = tq.kv_batch_get(keys=keys, partition_id=partition, select_fields=["prompts", "responses"])
    lengths = [len(prompt) + len(response) for prompt, response in _unbound(data, "prompts", "responses")]
    empty = [known.new_zeros((length, *known.shape[1:])) for length in lengths]
    fields = {FIELD: torch.nested.as_nested_tensor(empty, layout=torch.jagged)}
    tq.kv_batch_put(keys=keys, partition_id=partition, fields=TensorDict(fields, batch_size=len(keys)))


def _unbound(data: Any, *names: str) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(data[name].unbind() for name in names), strict=True)


def check_settings(batch: Any, step: int, expected: SamplingSettings, penalty: float = 1.0) -> None:
    """Refuse rollouts that were sampled with other settings than the trainer scores them by; raises RecordError.

    `penalty` is the repetition penalty of a request that names none.
    """
    scored = {name: getattr(expected, name) for name in READ} | NEUTRAL
    implied = {"repetition_penalty": penalty}
    for key, extra in extra_fields(batch):
        for settings in extra.get(SETTINGS, ()):
            for name, value in (implied | settings).items():
                keeps_all = name == "top_k" and value <= 0 and scored[name] <= 0  # 0 and -1 are the same
                if value == scored[name] or keeps_all:
                    continue
                if name in NEUTRAL:
                    raise RecordError(
                        f"rollout {key} of step {step} was sampled with {name}={value:g}, which the trainer does not "
                        f"know of; allowed: {scored[name]:g}. Let the agent loop pass on the settings that verl gives it."
                    )
                raise RecordError(
                    f"rollout {key} of step {step} was sampled with {name}={value:g}, and the trainer scores it with "
                    f"actor_rollout_ref.rollout.{name}={scored[name]:g}. Let the agent loop pass on the settings that verl gives "
                    "it."
                )


def check_tokens(batch: Any, step: int, bad: BadKeys, metrics: MutableMapping[str, Any]) -> None:
    """Call rollouts bad that have a token of the policy's which the engine has not sampled after the tokens before.

    Puts the share of such rollouts and tokens into `metrics`. Rollouts of which nobody noted it are left out.
    """
    forked = policy = misplaced = 0
    noted = {key: extra[SAMPLED] for key, extra in extra_fields(batch) if extra.get(SAMPLED)}
    keys = list(noted)
    for first in range(0, len(keys), CHUNK):
        part = keys[first : first + CHUNK]
        names = ["prompts", "responses", MASK]
        data = tq.kv_batch_get(keys=part, partition_id=batch.partition_id, select_fields=names)
        for key, (prompt, response, mask) in zip(part, _unbound(data, *names), strict=True):
            tokens = torch.cat([prompt, response]).numpy()
            missing = unsampled(tokens, len(prompt), mask.bool().numpy(), noted[key])
            policy += int(mask.bool().sum())
            misplaced += len(missing)
            if len(missing):
                forked += 1
                message = (
                    f"rollout {key} of step {step}, token {missing[0]}: the tokens to be trained on are not those that the "
                    "engine sampled. Let the agent loop keep the engine's token ids, and set response_mask to 0 for all others."
                )
                bad.add(key, "tokens", message)
    if noted:
        metrics[f"{PREFIX}turns/forked_frac"] = forked / len(noted)
        metrics[f"{PREFIX}turns/misplaced_frac"] = misplaced / policy if policy else 0.0


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


def extra_fields(batch: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
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
