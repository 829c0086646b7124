"""Every section and preset in verl: prepared by its driver, computed by its driver's functions, stepped by its FSDP2 engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from mismatch_ext.adapters.verl import config as settings
from mismatch_ext.adapters.verl.block import block_of
from mismatch_ext.adapters.verl.driver.objective import DriverKl
from mismatch_ext.adapters.verl.loss import BASELINE, make_loss
from mismatch_ext.adapters.verl.refusals import TRAINER, settings_of
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from torch import Tensor
from verl.protocol import DataProto
from verl.workers.utils.padding import no_padding_2_padding

from mismatch_ext.config import MismatchConfig
from mismatch_ext.correction import correct
from mismatch_ext.errors import MismatchError
from mismatch_ext.gap import gap_metrics, gap_sums
from mismatch_ext.kl import kl_terms
from mismatch_ext.lr import leading_statistics
from mismatch_ext.names import VERL
from mismatch_ext.patching import revert
from tests.peers.section_cases import CASES, names
from tests.peers.verl.in_process.losses import driven, host_config, relative
from tests.peers.verl.in_process.routes import as_rollout, carrying, nested, other
from tests.peers.verl.in_process.scenarios_driver import baseline_of
from tests.peers.verl.in_process.scenarios_losses import Engine, build_policy, sampled_batch
from tests.peers.verl.in_process.scenarios_replay import experts_seen
from tests.peers.verl.in_process.scenarios_training import watched
from tests.peers.verl.in_process.workers import batch, scored, update, worker
from tests.watching import Watching

ACTOR = "actor_rollout_ref.actor"
GIVEN = (
    "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.ref.strategy=${actor_rollout_ref.actor.strategy}",
    f"{ACTOR}.loss_agg_mode=seq-mean-token-sum",
    *(f"{ACTOR}.{name}=1e6" for name in ("clip_ratio", "clip_ratio_high", "clip_ratio_low", "clip_ratio_c")),
)  # fmt: skip


def prepared(section: str, keys: dict[str, Any]) -> tuple[DictConfig, MismatchConfig]:
    """Return verl's configuration as its driver prepares it for a block, and the block as the other processes get it."""
    config = host_config(*GIVEN)
    with open_dict(config):
        config.mismatch = {section: keys}
    settings.prepare(config)
    block = block_of(config.actor_rollout_ref)
    assert block is not None
    return config, block


class Host:
    """verl's worker with its engine, and a batch with its driver's fields."""

    def __init__(self, out: str) -> None:
        policy = build_policy(Path(out))
        self.data = sampled_batch(policy)  # by plain models: verl changes the class of one with a fused head
        self.engine = Engine(policy, 12)
        logps = self.padded(self.data, "old_log_probs")["old_log_probs"]
        # What the engine itself scores, so that the ratio to the old policy is 1.
        found: list[Tensor] = []

        def look(model_output: Any, data: TensorDict, dp_group: Any = None) -> Any:
            found.append(no_padding_2_padding(model_output["log_probs"], data).detach())
            return model_output["log_probs"].values().sum() * 0.0, {}

        self.engine.gradient(look, self.data)
        assert found[0].shape == logps.shape
        self.set("old_log_probs", found[0])
        generator = torch.Generator().manual_seed(5)
        gap = 0.6 * torch.randn(found[0].shape, generator=generator)
        gap[2:4] *= 1e-4  # rows that no rule rejects
        self.set("rollout_log_probs", found[0] - gap)
        self.mask = self.padded(self.data, "response_mask")["response_mask"].bool()
        self.uid = np.array([f"prompt {i % 3}" for i in range(len(self.data))], dtype=object)

    @staticmethod
    def padded(data: TensorDict, *names: str) -> Any:
        return data.select(*names).to_padded_tensor()

    def rows(self, values: Tensor) -> Tensor:
        """Return padded values `[B, T]` as the ragged rows of the batch."""
        lengths = self.data["response_mask"].offsets().diff().tolist()
        return nested([row[:length].contiguous() for row, length in zip(values, lengths, strict=True)])

    def set(self, name: str, values: Tensor, data: TensorDict | None = None) -> None:
        """Put padded values into a batch."""
        (self.data if data is None else data)[name] = self.rows(values)

    def proto(self, data: TensorDict) -> Any:
        """Return the batch as the driver has it between scores and advantages."""
        names = ("old_log_probs", "rollout_log_probs", "ref_log_prob", "response_mask")
        fields = {name: self.padded(data, name)[name] for name in names}
        fields["token_level_scores"] = torch.zeros_like(fields["old_log_probs"])
        return DataProto.from_dict(tensors=fields, non_tensors={"uid": self.uid})

    def by_hand(self, term: Any) -> Tensor:
        """Return the gradient of the mean over responses of the sum of a term, through the engine's log-probabilities."""

        def loss(model_output: Any, data: TensorDict, dp_group: Any = None) -> Any:
            logps = no_padding_2_padding(model_output["log_probs"], data)
            return torch.where(self.mask, term(logps), 0.0).sum() / len(self.mask), {}

        return self.engine.gradient(loss, self.data)[0]


def correction(host: Host, config: DictConfig, block: MismatchConfig) -> dict[str, Any]:
    """Hold the gradient of a step against A * weight * log pi, by hand."""
    from verl.trainer.ppo.v1 import trainer_base

    chosen = settings_of(block.correction)  # type: ignore[arg-type]
    data = host.data.clone()
    if chosen.mode == "bypass":
        data["old_log_probs"] = data["rollout_log_probs"]  # as verl's trainer does in this mode
    else:
        found, _ = trainer_base.compute_rollout_correction_and_add_to_batch(
            host.proto(data), config.algorithm.rollout_correction
        )
        host.set("response_mask", found.batch["response_mask"], data)
        if "rollout_is_weights" in found.batch.keys():
            host.set("rollout_is_weights", found.batch["rollout_is_weights"], data)
    ours, _ = host.engine.gradient(make_loss(driven(config), block), data)
    fields = host.padded(host.data, "old_log_probs", "rollout_log_probs", "advantages")
    old, rollout, advantages = (fields[n] for n in ("old_log_probs", "rollout_log_probs", "advantages"))
    decided = correct(
        old_logprobs=old, rollout_logprobs=rollout, response_mask=host.mask, config=chosen, advantages=advantages
    )
    weight = decided.as_multiplier()
    if chosen.mode == "bypass" and chosen.loss == "ppo_clip":
        weight = (old - rollout).exp() * decided.mask
    hand = host.by_hand(lambda logps: -weight * advantages * logps)
    plain = host.by_hand(lambda logps: -advantages * logps)
    scale = float(plain.norm())
    return {
        "what": "the gradient of the step is that of A times the preset's weight times log pi, by hand",
        "error": float((ours - hand).norm()) / scale,
        "effect": float((ours - plain).norm()) / scale,
    }


def kl(host: Host, config: DictConfig, block: MismatchConfig) -> dict[str, Any]:
    """Hold the KL's part of a step, or of the rewards, against its formula."""
    from verl.trainer.ppo.v1 import trainer_base

    assert block.kl is not None and block.kl.coef is not None
    driver, data = DriverKl(block.kl, config), host.data.clone()
    fields = host.padded(data, "old_log_probs", "ref_log_prob", "advantages")
    old, reference, advantages = (fields[n] for n in ("old_log_probs", "ref_log_prob", "advantages"))
    try:
        if block.kl.in_rewards:
            proto, _ = trainer_base.apply_kl_penalty(host.proto(data), None)
            expected = torch.where(host.mask, -block.kl.coef * (old - reference), 0.0)
            found = proto.batch["token_level_rewards"]
            what = "the token-level rewards that advantages are computed from"
            return {"what": what, "error": float((found - expected).abs().max()), "effect": float(expected.abs().max())}
        if block.kl.has_baseline:
            host.set(BASELINE, baseline_of(host.proto(data), block.kl), data)
    finally:
        revert(*driver.patches)
    ours, _ = host.engine.gradient(make_loss(driven(config), block), data)
    groups = torch.arange(len(host.mask)) % 3
    section = block.kl
    hand = host.by_hand(
        lambda logps: (
            kl_terms(logprobs=logps, ref_logprobs=reference, mask=host.mask, settings=section, groups=groups).loss
            - advantages * logps
        )
    )
    without = host.by_hand(lambda logps: -advantages * logps)
    what = "the KL's part of the gradient is that of the surrogate on the step's log-probabilities"
    return {"what": what, "error": relative(ours, hand), "effect": relative(without, hand)}


def precision(model: str, keys: dict[str, Any], config: DictConfig, block: MismatchConfig) -> dict[str, Any]:
    """Read back the dtype of the step's products, from the configuration that the driver has prepared."""
    dtype, group = keys["dtype"], config.actor_rollout_ref
    param = group.actor.fsdp_config.mixed_precision["param_dtype"]
    names = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
    built = worker(model, block.to_dict(), dtype=names[param])
    seen: set[str] = set()
    layer = built.engine.module.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda module, args, output: seen.add(str(output.dtype).removeprefix("torch.")))
    update(built, scored(built, batch()))
    scaled = built.engine.scaler is not None
    good = seen == {dtype} and group.rollout.dtype == dtype and scaled == (dtype == "float16")
    return {
        "what": "the dtype of products in the step's forward pass, the loss scaler, and verl's setting of the rollout's dtype",
        "error": 0.0 if good else 1.0,
        "effect": 1.0,
        "read": [sorted(seen), group.rollout.dtype, scaled],
    }


def routing(model: str, keys: dict[str, Any], config: DictConfig, block: MismatchConfig) -> dict[str, Any]:
    """Hand routes to the step that the model itself would not choose, and look at what its experts are given."""
    recorded = config.actor_rollout_ref.rollout.enable_rollout_routing_replay
    built = worker(model, block.to_dict())
    recorder = built if keys["mode"] == "R2" else worker(model, {"routing": {"mode": "R2"}})
    data = scored(recorder, batch())
    changed = other(data["routed_experts"])
    data["routed_experts"] = changed if keys["mode"] == "R2" else carrying(as_rollout(changed), data["input_ids"])
    with experts_seen(built) as seen:
        update(built, data)
    layer = [row[:, 0].long() for row in changed.unbind()]
    # Rows beyond the last sampled token have no route of a rollout engine's; every other one is the changed one.
    given = {tuple(sorted(ids)) for row in layer for ids in row[:-1].tolist() if any(ids)}
    got = {tuple(sorted(ids)) for ids in seen[0].flatten(0, -2).long().tolist()}
    return {
        "what": "the experts that the step's layers were handed: those of routes that the model would not choose",
        "error": 0.0 if given <= got and recorded == (keys["mode"] == "R3") else 1.0,
        "effect": 1.0,
        "read": [len(given), len(got), len(given & got)],
    }


def lr(model: str, keys: dict[str, Any], config: DictConfig, block: MismatchConfig) -> dict[str, Any]:
    """Read the rate that the optimizer stepped with, or the statistics in the live control."""
    built = worker(model, block.to_dict())
    rates = watched(built.engine.optimizer)
    data = scored(built, batch())
    old = data["old_log_probs"].to_padded_tensor(0.0)
    mask = data["response_mask"].to_padded_tensor(0).bool()
    lengths, norms, given = mask.sum(1), [], []
    assert block.lr is not None
    for number in range(2):
        gap = gap_metrics(gap_sums(old=old, rollout=old - 0.1 * (number + 1), mask=mask))
        found = leading_statistics(block.lr.trigger, lengths, lengths >= 8, gap)
        given.append(found)
        built.engine.mismatch_update_lr(**found)
        norms.append(float(update(built, data)["grad_norm"][0]))
    history = [measurement.value for measurement in built.engine._rate.state.history]
    if "period" in keys:
        ratio = rates[1] / rates[0]
        return {
            "what": "the rate that the optimizer stepped with",
            "error": abs(ratio - 0.5),
            "effect": 0.5,
            "read": rates,
        }
    trigger = block.lr.trigger
    expected = norms[:1] if trigger == "grad_norm" else [found[trigger] for found in given]
    close = len(history) == len(expected) and np.allclose(history, expected, rtol=1e-5)  # type: ignore[arg-type]
    return {
        "what": "the rate that the optimizer stepped with, and the trigger's statistic in the live control",
        "error": 0.0 if close and len(rates) == 2 else 1.0,
        "effect": 1.0,
        "read": [history, expected, rates],
    }


def monitor(label: str, config: DictConfig, block: MismatchConfig) -> dict[str, Any]:
    """Read what the driver is set to, or the alarm on verl's own metric."""
    if label == "alarms":
        raised = Watching(block.monitor, VERL).observe(1, {"actor/pg_loss": 1.0, "actor/loss": 1.0})
        return {"what": "the alarm on verl's own metric", "error": 0.0 if raised else 1.0, "effect": 1.0}
    chosen = config.trainer.v1.trainer_mode == TRAINER
    return {"what": "the trainer that verl's registry is asked for", "error": 0.0 if chosen else 1.0, "effect": 1.0}


def one(
    host: Host, dense: str, moe: str, section: str, label: str, config: DictConfig, block: MismatchConfig
) -> dict[str, Any]:
    """Step and read back one case that the driver has prepared."""
    keys = CASES[section][label]
    if section == "correction":
        return correction(host, config, block)
    if section == "kl":
        return kl(host, config, block)
    if section == "precision":
        return precision(dense, keys, config, block)
    if section == "routing":
        return routing(moe, keys, config, block)
    if section == "lr":
        return lr(dense, keys, config, block)
    return monitor(label, config, block)


def every(dense: str, moe: str, out: str, only: list[str] | None = None) -> dict[str, Any]:
    """Return what became of every case in verl."""
    found: dict[str, Any] = {}
    plans = {}
    # All of them first, as in a driver: with the trainer's module verl imports others, with which no block is taken.
    for section, labels in CASES.items():
        for label in labels if only is None or section in only else ():
            try:
                plans[section, label] = prepared(section, CASES[section][label])
            except MismatchError as error:
                found[f"{section}/{label}"] = {"refused": f"{type(error).__name__}: {error}"}
    host = Host(out)
    for (section, label), plan in plans.items():
        found[f"{section}/{label}"] = one(host, dense, moe, section, label, *plan)
    return {name: found[name] for name in names() if name in found}
