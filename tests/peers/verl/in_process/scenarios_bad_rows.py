"""Bad rows through the driver's functions and verl's own losses, without Ray: the queue is a dictionary of rows."""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from mismatch_ext.adapters.verl import measure
from mismatch_ext.adapters.verl.bad_rows import FAULT, bad_rows, number_of
from mismatch_ext.adapters.verl.driver import bad_keys, batch_checks
from mismatch_ext.adapters.verl.loss import BASELINE, make_loss
from mismatch_ext.adapters.verl.measure import OLD, REFERENCE, ROLLOUT, BadKeys, Scoring
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss

from mismatch_ext.config import KlConfig, MismatchConfig
from mismatch_ext.kl import kl_sums
from mismatch_ext.rollout import Origins, Provenance, SamplingSettings
from tests.peers.verl.in_process.losses import actor_config, batch_of
from tests.peers.verl.in_process.routes import nested, refused
from tests.peers.verl.in_process.scenarios_measuring import Queue, told

MODES = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro", "cispo")
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
LENGTHS = (6, 3, 4, 5)
BAD = 1
"""The row that is bad."""


def rows_of(seed: int = 0) -> dict[str, list[Tensor]]:
    """Return the fields of four rows as verl's loss gets them; clip_cov and kl_cov find covariances within their bounds."""
    generator = torch.Generator().manual_seed(seed)

    def draw(scale: float) -> list[Tensor]:
        return [scale * torch.randn(length, generator=generator) for length in LENGTHS]

    old = [-2 + noise for noise in draw(0.4)]
    advantages = [torch.full((length,), value) for length, value in zip(LENGTHS, (3.0, -2.7, 2.3, -4.2), strict=True)]
    data = batch_of(
        [torch.arange(length) for length in LENGTHS],
        {
            OLD: old,
            ROLLOUT: [row + noise for row, noise in zip(old, draw(0.1), strict=True)],
            "ref_log_prob": [row + noise for row, noise in zip(old, draw(0.3), strict=True)],
            "advantages": advantages,
            BASELINE: draw(0.1),
        },
    )
    return {name: list(field.unbind()) for name, field in data.items() if isinstance(field, Tensor)}


def key_of(row: int) -> str:
    """Return the key of a row in the queue."""
    return f"prompt_{row}_0"


def keys_of(given: Queue) -> Any:
    """Return verl's keys of the batch."""
    return SimpleNamespace(
        keys=given.keys, tags=[{} for _ in given.keys], partition_id="train", fields=list(given.rows)
    )


def judged(given: Queue) -> tuple[Any, BadKeys]:
    """Measure a batch as the driver does after the scoring pass; return its keys and the bad rows that were found."""
    measure.tq = bad_keys.tq = batch_checks.tq = given  # type: ignore[assignment]
    keys = keys_of(given)
    bad = BadKeys(keys)
    measure.take_faults(keys, 1, bad)
    measure.measure(keys, 1, Scoring(), bad, longest=99, reference=True)
    return keys, bad


def taken_out(rows: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
    """Return the fields that workers fetch of a batch, after the driver has taken out what it found to be bad."""
    given = Queue(rows)
    keys, bad = judged(given)
    bad_keys.replace_non_finite(keys, bad)
    bad_keys.mark(keys, bad)
    bad_keys.take_out(keys, bad)
    return {name: given.rows[name] for name in keys.fields}


def gradients(loss: Any, rows: dict[str, list[Tensor]]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return a loss of the batch and its gradients by each row's log-probabilities and entropies, tokens counted as verl does."""
    data = TensorDict({name: nested(values) for name, values in rows.items()}, batch_size=len(LENGTHS))
    tu.assign_non_tensor(
        data, dp_size=1, batch_num_tokens=int(data["loss_mask"].values().sum()), global_batch_size=len(LENGTHS)
    )
    generator = torch.Generator().manual_seed(9)
    old = data["input_ids"].offsets()
    logps = (-2 + 0.4 * torch.randn(int(old[-1]), generator=generator)).requires_grad_()
    entropies = (torch.rand(int(old[-1]), generator=generator) + 0.5).requires_grad_()
    output = {"log_probs": logps, "entropy": entropies}
    torch.manual_seed(3)  # clip_cov draws among the tokens that it finds
    value, _ = loss(
        model_output={name: torch.nested.nested_tensor_from_jagged(one, old) for name, one in output.items()},
        data=data,
        dp_group=None,
    )
    found = torch.autograd.grad(value, [logps, entropies], allow_unused=True, materialize_grads=True)
    lengths = data["input_ids"].offsets().diff().tolist()
    return value.detach(), list(found[0].split(lengths)), list(found[1].split(lengths))


def check(loss: Any, poison: tuple[str, ...], case: str, *, chosen: bool = True) -> None:
    """Compare a batch with a bad row, taken out, with the same batch in which the row is good; `chosen` compares all rows."""
    _, whole, whole_entropy = gradients(loss, rows_of())
    rows = rows_of()
    for name in poison:
        rows[name][BAD] = rows[name][BAD].clone()
        rows[name][BAD][0] = float("nan")
    value, found, entropy = gradients(loss, taken_out(rows))
    assert value.isfinite() and whole[BAD].any(), case
    assert not found[BAD].any() and not entropy[BAD].any(), case
    for row in set(range(len(LENGTHS))) - {BAD} if chosen else ():
        assert torch.equal(whole[row], found[row]) and torch.equal(whole_entropy[row], entropy[row]), case


def losses() -> None:
    """Take a bad row out of each of verl's losses under each aggregation, with NaN on either side and on both."""
    # A third of the tokens are chosen by covariance, so that it matters among which.
    options = {"dro_beta": 0.1, "kl_cov_ratio": 0.3, "clip_cov_ratio": 0.1, "clip_cov_lb": -50.0, "clip_cov_ub": 50.0}
    for mode, aggregation in itertools.product(MODES, AGGREGATIONS):
        config = actor_config(
            {"loss_mode": mode, **options}, loss_agg_mode=aggregation, use_kl_loss=False, entropy_coeff=0.0
        )
        for poison in ((ROLLOUT,), (OLD,), (OLD, ROLLOUT)):
            chosen = mode not in ("clip_cov", "kl_cov")  # which choose among all tokens of a micro-batch
            check(partial(ppo_loss, config=config), poison, f"{mode} {aggregation} {poison}", chosen=chosen)


def terms() -> None:
    """The same with verl's KL and entropy terms, and with our KL term, under each aggregation."""
    block = MismatchConfig.parse({"kl": {"coef": 0.1, "estimator": "k3"}})
    assert block is not None
    for aggregation, poison in itertools.product(AGGREGATIONS, (OLD, REFERENCE)):
        config = actor_config(loss_agg_mode=aggregation, use_kl_loss=True, kl_loss_coef=0.1, entropy_coeff=0.1)
        for loss in (partial(ppo_loss, config=config), make_loss(config, block)):
            check(loss, (poison,), f"{loss} {aggregation} {poison}")


def marked() -> None:
    """Check what workers are told of a batch's rows, and what a scoring pass says of them to the driver."""
    given = Queue(rows_of())
    given.rows[FAULT] = [torch.zeros(4 + length, dtype=torch.int64) for length in LENGTHS]
    given.rows[FAULT][2] += number_of("routes")
    keys, bad = judged(given)
    ((reason, message),) = told(bad)
    assert reason == "routes" and message.startswith("rollout prompt_2_0 of step 1: its routes are missing, malformed")
    bad_keys.mark(keys, bad)
    data = given.kv_batch_get(given.keys, "train", ["mismatch_bad_row", "loss_mask"])
    assert bad_rows(data) == [False, False, True, False]
    assert bad_rows(data.exclude("mismatch_bad_row")) == [False] * 4
    logprobs, ref_logprobs, mask = (
        nested(given.rows[name]).to_padded_tensor(0.0) for name in (OLD, "ref_log_prob", "response_mask")
    )
    mask[2] = 0
    sums = measure.measure(keys, 1, Scoring(), bad, longest=99, reference=True, kl=KlConfig(coef=1.0)).kl
    assert sums is not None
    for name, value in kl_sums(logprobs=logprobs, ref_logprobs=ref_logprobs, mask=mask).items():
        assert torch.equal(sums[name], value), name


def of_versions() -> None:
    """Check the versions of a batch's weights: one row of others, in both kinds of modes, and all rows."""
    origins = Origins(SamplingSettings())
    origins.present = Provenance(
        engine="vllm", engine_version="1", dtype="float32", kv_cache_dtype=None, weight_version=4, patch_digest="x",
        sampling=SamplingSettings(), logprobs_mode="processed_logprobs",
    )  # fmt: skip
    for versions, older, wrong in (
        ((4, 3, 4, 4), False, [1]),
        ((4, 4, None, 4), False, [2]),
        ((4, 5, 3, 4), True, [1]),
        ((3, 3, 3, 3), False, None),
    ):
        given = Queue(rows_of())
        keys = keys_of(given)
        keys.tags = [{"min_global_steps": version, "max_global_steps": version} for version in versions]
        bad = BadKeys(keys)
        error = refused(batch_checks.check_versions, origins, keys, bad, older=older)
        assert error.startswith("RecordError: " if wrong is None else "nothing was refused"), versions
        assert sorted(bad.rows.faults) == (wrong or []), versions
        assert {fault.reason for fault in bad.rows.faults.values()} <= {"weight_version"}


class Routes(Queue):
    """A queue that returns a field only if all rows have it, as TransferQueue does."""

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        chosen = [self.keys.index(key) for key in keys]
        there = [name for name in select_fields if all(self.rows[name][row] is not None for row in chosen)]
        return super().kv_batch_get(keys, partition_id, there)


def lost() -> None:
    """Check the routes of batches of which one row and all rows have lost them."""
    for gone in ({BAD}, set(range(4))):
        rows: dict[str, list[Any]] = dict(rows_of())
        # Two layers of the model and one of digests, of four experts for each token.
        rows["routed_experts"] = [
            None if row in gone else torch.ones((4 + length, 3, 4), dtype=torch.int16)
            for row, length in enumerate(LENGTHS)
        ]
        given = Routes(rows)
        batch_checks.tq = given  # type: ignore[assignment]
        keys = keys_of(given)
        bad = BadKeys(keys)
        error = refused(batch_checks.check_routes, keys, 1, bad, acts=True)
        if len(gone) > 1:
            assert error.startswith("RoutingError: all 4 rollouts of step 1 came without routing")
            continue
        ((reason, message),) = told(bad)
        assert reason == "routes" and message.startswith("rollout prompt_1_0 of step 1 came without routing")
        put = given.rows["routed_experts"][BAD]
        assert error == "nothing was refused" and put.shape == (7, 3, 4) and not put.any()
