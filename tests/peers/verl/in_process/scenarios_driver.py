"""The actor's loss and the driver's part of KL and correction without an engine, and what a section sets in verl."""

from __future__ import annotations

import json
import math
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from mismatch_ext.adapters.verl.behavior import check_weights
from mismatch_ext.adapters.verl.config import set_correction, set_kl
from mismatch_ext.adapters.verl.loss import make_loss, weighs
from mismatch_ext.adapters.verl.measure import baseline_of as baseline_of_rows
from mismatch_ext.adapters.verl.measure import groups
from omegaconf import OmegaConf
from torch import Tensor
from verl.protocol import DataProto
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos

from mismatch_ext.config import KlConfig, MismatchConfig
from mismatch_ext.kl import KlTerm, kl_sums
from mismatch_ext.patching import revert
from mismatch_ext.sums import merged
from mismatch_ext.testing import Problem
from tests.oracles.kl.facts import FACTS
from tests.peers.verl.in_process.losses import (
    END,
    actor_config,
    batch_of,
    block_of,
    driven,
    host_config,
    loss_on,
)
from tests.peers.verl.in_process.routes import refused


def exact() -> dict[str, Any]:
    """Hold every documented configuration through verl's ppo_loss against exact values, in float64."""
    result = {}
    for fact in FACTS:
        problem = Problem.random(3, 3, 1, lag=0.0 if fact.sampling == "on-policy" else 0.3)
        tree = problem.tree
        logps = tree.logprobs(problem.policy).requires_grad_()
        rows = len(logps)
        behavior, reference = tree.logprobs(problem.behavior), tree.logprobs(problem.reference)
        fields = {
            "ref_log_prob": list(reference),
            "rollout_log_probs": list(behavior),
            "old_log_probs": list(logps.detach()),
        }
        data = batch_of(list(tree.sequences), fields)
        config = actor_config(use_kl_loss=True, loss_agg_mode="seq-mean-token-sum")
        loss, metrics = loss_on(make_loss(config, MismatchConfig(kl=fact.config)), logps, data)
        per_row = torch.autograd.grad(loss, logps)[0] * rows if loss.requires_grad else torch.zeros_like(logps)
        # The mean over rows is that of verl's aggregation; the chain to the policy's table weighs each row as it is sampled.
        table = problem.policy.clone().requires_grad_()
        weights = problem.probabilities
        found = torch.autograd.grad(tree.logprobs(table), table, weights[:, None] * per_row)[0]
        documented, size = fact.documented_gradient(problem), fact.truth(problem)[1].norm()
        name = f"{fact.estimator}/{fact.placement}/{fact.target}/{fact.sampling}"
        result[name] = {
            "documented": float((found - documented).norm() / size), "unbiased": fact.unbiased,
            "true": float((found - fact.truth(problem)[1]).norm() / size), "mode": metrics["kl_loss"].aggregation.value,
        }  # fmt: skip
    return result


def policy_losses() -> dict[str, str]:
    """Return what the start of a worker says to a correction with each of verl's policy losses, and with a user's.

    A policy loss of the user's is registered as verl's documentation says, by a module that the worker has imported.
    """

    def plain(given: dict[str, Any]) -> Tensor:
        return -given["advantages"] * (given["log_prob"] - given["old_log_prob"]).exp()

    def mean(terms: Tensor, given: dict[str, Any]) -> Any:
        info = given["config"].global_batch_info
        return core_algos.agg_loss(terms, given["response_mask"], given["loss_agg_mode"], **info), {}

    users: dict[str, Any] = {
        "ignores": lambda **given: mean(plain(given), given),
        "draws": lambda **given: mean(plain(given) * torch.rand_like(given["log_prob"]), given),
        "draws and multiplies": lambda **given: mean(
            plain(given) * given["rollout_is_weights"] * torch.rand_like(given["log_prob"]), given
        ),
        "draws by numpy": lambda **given: mean(plain(given) * float(np.random.rand()), given),
        "corrects some": lambda **given: mean(
            plain(given) * torch.where(given["advantages"] > 0, given["rollout_is_weights"], 1.0), given
        ),
        "fails": lambda **given: 1 / 0,
        "multiplies": lambda **given: mean(plain(given) * given["rollout_is_weights"], given),
    }
    corrected = ("tis", "decoupled_k3_rs", "bypass_pg_is")
    assert [weighs(block_of(correction={"preset": preset})) for preset in corrected] == [True, False, False]
    verls, found, state = list(core_algos.POLICY_LOSS_REGISTRY), {}, torch.get_rng_state()
    for name, function in users.items():
        core_algos.register_policy_loss(name)(function)
    try:
        for name in {*verls, *users} - {"fails"}:
            # A bound as narrow as GSPO's would clip every ratio that is off 1 by a thousandth.
            config = actor_config({"loss_mode": name, "dro_beta": 0.1}, clip_ratio_low=3e-4, clip_ratio_high=4e-4)
            found[name] = refused(check_weights, config)
        for name, config in (("fails", {"loss_mode": "fails"}), ("unset", {"loss_mode": "dro"})):
            with warnings.catch_warnings(record=True, action="always") as warned:
                assert refused(check_weights, actor_config(config)) == "nothing was refused"
            found[name] = str(warned[0].message)
    finally:
        for name in users:
            del core_algos.POLICY_LOSS_REGISTRY[name]
    found["random numbers"] = "as before" if torch.equal(state, torch.get_rng_state()) else "drawn"
    return found


def proto(rows: int = 12, length: int = 7, seed: int = 0) -> Any:
    """Return a padded batch of the driver: three prompts, with lengths of their own and gaps from small to large."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    mask = torch.arange(length) < torch.randint(2, length + 1, (rows, 1), generator=generator)
    old = -2 * torch.rand(rows, length, generator=generator)
    gap = 10.0 ** (-4 + 4 * torch.rand(rows, 1, generator=generator)) * draw(rows, length)
    batch = {
        "old_log_probs": old, "rollout_log_probs": old - gap, "ref_log_prob": old + 0.3 * draw(rows, length),
        "response_mask": mask.long(), "token_level_scores": draw(rows, length) * mask,
    }  # fmt: skip
    batch = {k: torch.where(mask, v, 0) for k, v in batch.items()}
    uid = np.array([f"prompt {i % 3}" for i in range(rows)], dtype=object)
    return DataProto.from_dict(tensors=batch, non_tensors={"uid": uid})


def baseline_of(data: Any, section: KlConfig, keys: list[str] | None = None) -> Any:
    """Return the baseline of a batch group by group; without keys each row is a session of its prompt."""
    uids = data.non_tensor_batch["uid"]
    keys = [f"{uid}_{row}_0" for row, uid in enumerate(uids)] if keys is None else keys
    found = torch.zeros_like(data.batch["old_log_probs"])
    for group in groups(keys):
        rows = [keys.index(key) for key in group]
        part = {name: values[rows] for name, values in data.batch.items()}
        found[rows] = baseline_of_rows(part, section, torch.zeros(len(rows), dtype=torch.long))
    return found


def adapted(data: Any, term: KlTerm) -> dict[str, float]:
    """Let a term adapt to a batch that lies on two ranks."""
    old, ref, mask = (data.batch[name] for name in ("old_log_probs", "ref_log_prob", "response_mask"))
    halves = (slice(None, 5), slice(5, None))
    parts = [kl_sums(logprobs=old[half], ref_logprobs=ref[half], mask=mask[half]) for half in halves]
    term.begin()
    return term.add(merged(*parts))


@contextmanager
def driving(kl: KlConfig) -> Iterator[Any]:
    """Put a section's penalty where verl's driver calls its own by name; yield the driver's KL and that place.

    Imported here, in a fork: with its driver verl imports the trainers that a block is refused in, by their presence, in every
    fork to come.
    """
    from mismatch_ext.adapters.verl.driver.objective import DriverKl
    from verl.trainer.ppo.v1 import trainer_base

    driver = DriverKl(kl, host_config())
    try:
        yield driver, trainer_base
    finally:
        revert(*driver.patches)


def rewards() -> None:
    """Hold the KL in verl's rewards against its formula."""
    data = proto()
    section = KlConfig(estimator="k1", placement="reward", reward_path="rewards", coef=0.5)
    with driving(section) as (driver, verls):
        assert "verl computed advantages without its apply_kl_penalty" in refused(driver.check_penalized)
        data, metrics = verls.apply_kl_penalty(data, kl_ctrl=None, kl_penalty="kl")
        driver.check_penalized()
    mask = data.batch["response_mask"]
    d = (data.batch["old_log_probs"] - data.batch["ref_log_prob"]) * mask
    expected = data.batch["token_level_scores"] - 0.5 * d
    assert d.sum(1).std() > 0.1
    torch.testing.assert_close(data.batch["token_level_rewards"], expected, rtol=0, atol=1e-6)
    mean = float((d.sum(1) / mask.sum(1)).mean())
    assert math.isclose(metrics["actor/reward_kl_penalty"], mean, abs_tol=1e-6)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.5


def coefficient() -> None:
    """Hold a coefficient that follows a target against plain formulas, also after a resume and while the critic warms up."""
    data = proto()
    section = block_of(kl={"coef": 0.1, "target_kl": 1e-3}).kl
    assert section is not None
    control, resumed = KlTerm(section, 0.1), KlTerm(section, 0.1)
    # The first batch has the coefficient to start with: its own KL counts from the second. The error is at its clip, -0.2:
    # log coef = log 0.1 + 0.05 (-0.2) + 0.1 (-0.2), and again 0.05 (-0.2) less.
    for exponent in (0.0, -0.03, -0.04):
        assert math.isclose(adapted(data, control)["kl_coef"], 0.1 * math.exp(exponent))
    resumed.load_state_dict(json.loads(json.dumps(control.state_dict())))
    for one in (control, resumed):
        assert math.isclose(adapted(data, one)["kl_coef"], 0.1 * math.exp(-0.05))
    with driving(section) as (driver, _):
        driver._config.trainer.critic_warmup = 3
        sums = kl_sums(logprobs=torch.zeros(8), ref_logprobs=torch.zeros(8), mask=torch.ones(8))
        first, *others = [driver.prepare(sums, step)["mismatch/kl_coef"] for step in range(1, 7)]
    # It stands still while the critic alone is updated.
    assert others[:2] == [first] * 2 and first > others[2] > others[3] > others[4]


def padding(policy_loss: str = "bypass_mode") -> None:
    """Compute a micro-batch that verl fills up, after the loss was pickled, and one that lacks the reference."""
    native = {"loss_mode": policy_loss, "rollout_correction": RolloutCorrectionConfig.bypass_pg_is()}
    config, logps = actor_config(loss=native), torch.full((2, 1), -1.0, requires_grad=True)
    empty = batch_of([torch.tensor([END])] * 2, {"response_mask": [torch.zeros(1).long()] * 2})
    loss = pickle.loads(pickle.dumps(make_loss(config, block_of(correction={"preset": "bypass_pg_is"}))))
    value, _ = loss_on(loss, logps, empty)
    (gradient,) = torch.autograd.grad(value, logps)
    assert float(value) == 0.0 and not gradient.any()
    said = refused(loss_on, make_loss(actor_config(), block_of(kl={"coef": 0.1})), logps, empty)
    assert said.startswith("RecordError") and "'ref_log_prob'" in said


def set_up(overrides: list[str], section: str, given: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check what a section sets in verl's configuration."""
    config = host_config(*overrides)
    before = OmegaConf.to_container(config, resolve=False)
    part = getattr(block_of(**{section: given} if given else {}), section)
    if section == "correction":
        set_correction(config, part)
    else:
        set_kl(config, part)
    driven(config)
    found = differences(before, OmegaConf.to_container(config, resolve=False))
    assert found == expected, (section, given)


def differences(before: Any, after: Any, path: str = "") -> dict[str, Any]:
    """Return what differs in two configurations, by dotted name, without keys of new parts that have no value."""
    if isinstance(before, dict) and isinstance(after, dict):
        parts = [differences(before.get(key), after[key], f"{path}.{key}".lstrip(".")) for key in after]
        return {name: value for part in parts for name, value in part.items()}
    if isinstance(after, dict):
        after = {key: value for key, value in after.items() if value is not None}
    return {} if before == after else {path: after}


def settings(cases: list[Any]) -> None:
    """Check what each of several sections sets."""
    for case in cases:
        set_up(**case)
