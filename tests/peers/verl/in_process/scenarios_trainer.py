"""Our trainer around a stand-in for verl's, whose steps call the methods that verl's calls, in its order, without Ray."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from mismatch_ext.adapters.verl import evidence, measure
from mismatch_ext.adapters.verl.block import RunMode, hand_on
from mismatch_ext.adapters.verl.driver import batch_checks
from omegaconf import DictConfig, open_dict

from mismatch_ext.checks import Checks
from mismatch_ext.config import MismatchConfig
from mismatch_ext.doctor import read_rollouts
from mismatch_ext.errors import WeightSyncError
from tests.peers.verl.in_process.losses import host_config
from tests.peers.verl.in_process.routes import refused
from tests.peers.verl.in_process.scenarios_measuring import Queue, batch, queue
from tests.peers.verl.recorded import recorded

BLOCK = {
    "kl": {"coef": 0.1, "target_kl": 1e-3, "reward_path": "surrogate"},
    "lr": {"trigger": "response_length"},
    "monitor": {"weight_sync": "off", "metrics": "all", "alarms": {"logp_abs_diff_max": {"above": 0.0, "patience": 1}}},
}


class Workers:
    """What the driver asks verl's worker group, and in which order."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        own = {
            "lr": {"period": 1},
            "loss": "mismatch_ext.adapters.verl.loss",
            "readiness": "masters are rounded",
        }
        self.report = recorded("dense")["workers"][0] | own

    def mismatch_report(self) -> list[Any]:
        self.asked.append("report")
        return [self.report]

    def mismatch_update_lr(self, **statistics: float) -> list[dict[str, float]]:
        self.asked.append(f"update_lr {statistics['response_length']:.2f}")
        return [{"lr_multiplier": 1.0}]

    def mismatch_metrics(self) -> list[dict[str, float]]:
        self.asked.append("metrics")
        return [{"skipped_steps": 1.0}]


def batches_without_good_rows() -> dict[str, Any]:
    """Return how many updates of actor and critic verl is asked for, by the bad rows of a batch of six.

    Also returns whether the check of weight updates is told of a step, after this batch and after no other one.
    """
    from mismatch_ext.adapters.verl.driver.trainer import MismatchTrainer  # in a fork, as `steps` says

    found: dict[str, Any] = {}
    told: list[bool] = []
    weights = SimpleNamespace(settle=list, look=list, verify=lambda *, stepped: told.append(stepped))
    for name, count, acts in (("one is good", 5, True), ("none is good", 6, True), ("only measured", 6, False)):
        driver: Any = object.__new__(type("Trainer", (MismatchTrainer, StandIn), {}))
        driver._block, driver._kl = MismatchConfig(), None
        driver._checks, driver._bad = Checks(acts, lambda: 1), measure.BadKeys(batch(queue(1)))
        driver.actor_rollout_wg, driver.parameter_sync_step, driver.extra = Workers(), 1, []
        driver._processes, driver.global_steps = SimpleNamespace(follow_weights=lambda step: None), 1
        driver._weights, driver._actor_updated = weights, False
        given = SimpleNamespace(extra_info={})
        for row in range(count):
            driver._bad.rows.add(row, "rollout_logprobs", "")
        driver._update_critic(given, {})
        driver._update_actor(given, {})
        told.clear()
        for _ in range(2):
            driver._update_weights(lambda: None)
        found[name] = {"updates": len(driver.extra), "stepped": list(told)}
    return found


def saved_before_an_error() -> list[Any]:
    """Return what a run saves, of steps 3 and 3 again, before the error about weights that did not arrive, and its error."""
    from mismatch_ext.adapters.verl.driver.trainer import MismatchTrainer  # in a fork, as `steps` says

    def wrong(*, stepped: bool) -> None:
        raise WeightSyncError("stale")

    kind: Any = type("Trainer", (MismatchTrainer, StandIn), {})
    driver, done = object.__new__(kind), list[Any]()
    driver._checks, driver.trainer_mode, driver.global_steps = Checks(True, lambda: 3), "sync", 3
    driver._processes = SimpleNamespace(follow_weights=lambda step: None)
    driver._weights, driver._actor_updated, driver._saved_step = (
        SimpleNamespace(settle=list, look=list, verify=wrong),
        True,
        2,
    )
    driver.checkpoint_manager = SimpleNamespace(sleep_replicas=lambda: done.append("sleep"))

    def save() -> None:
        done.append("save")
        driver._saved_step = 3

    driver._save_checkpoint = save
    return [
        refused(driver._update_weights, lambda: None),
        *done,
        refused(driver._update_weights, lambda: None),
        *done[2:],
    ]


class StandIn:
    """verl's trainer, as far as ours calls and overrides it."""

    __module__ = "verl.stand_in"
    queue: Queue
    local_trigger_step = 0
    total_training_steps = 9

    def __init__(self, config: DictConfig) -> None:
        self.config, self.trainer_mode, self.parameter_sync_step = config, "sync", 1
        self.actor_rollout_wg, self.tokenizer, self.global_steps = Workers(), range(16), 0
        self.extra: list[dict[str, Any]] = []
        self.sent = 0  # version that the rollout servers have
        self.checkpoint_manager = SimpleNamespace(replicas=[self])

    def init(self) -> None:
        self.on_init_end()

    def on_init_end(self) -> None:
        self.sent = self.global_steps

    on_step_end = on_init_end

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> Any:
        return self._step_once(metrics, timing_raw, 7)

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, Any], sample_batch_size: int) -> Any:
        given = batch(self.queue)
        given.extra_info, given.fields = {}, None
        for tag in given.tags:
            tag |= {"min_global_steps": self.sent, "max_global_steps": self.sent}
        for method in (self._compute_old_log_prob, self._compute_ref_log_prob, self._compute_advantage):
            given = method(given, metrics)
        return self._update_actor(given, metrics)

    def _compute_old_log_prob(self, given: Any, metrics: dict[str, Any]) -> Any:
        return given

    _compute_ref_log_prob = _compute_old_log_prob

    def _compute_advantage(self, given: Any, metrics: dict[str, Any]) -> Any:
        self.queue.rows["loss_mask"] = list(self.queue.rows["response_mask"])
        self.queue.rows["response_mask"][0] = self.queue.rows["response_mask"][0] * 0
        return given

    def _update_actor(self, given: Any, metrics: dict[str, Any]) -> Any:
        self.extra.append(dict(given.extra_info))
        metrics["actor/mismatch/off_policy_masked_fraction"] = 0.25
        return given

    def _update_critic(self, given: Any, metrics: dict[str, Any]) -> Any:
        self.extra.append(dict(given.extra_info))
        return given

    def _compute_metrics(self, given: Any, metrics: dict[str, Any], timing: Any, global_steps: int, epoch: int) -> None:
        metrics["training/global_step"] = global_steps

    def _save_checkpoint(self) -> None:
        Path(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}").mkdir(exist_ok=True)

    def _load_checkpoint(self) -> None:
        self.global_steps = 2

    def fit(self, agent_loop_manager: Any) -> None:
        for _ in range(2):
            self.global_steps += 1
            metrics: dict[str, Any] = {}
            self.queue = queue(self.global_steps)
            measure.tq = evidence.tq = batch_checks.tq = self.queue  # type: ignore[assignment]
            given = self.step(metrics, {})
            self._save_checkpoint()
            self.on_step_end()
            self._compute_metrics(given, metrics, {}, self.global_steps, 0)
            agent_loop_manager.append(metrics)


def steps() -> dict[str, Any]:
    """Take two steps, and two more after a resume; return what was asked, logged, kept and said."""
    # Imported here, in a fork: with its driver verl imports the trainers that a block is refused in.
    from mismatch_ext.adapters.verl.driver import processes
    from mismatch_ext.adapters.verl.driver.reports import RolloutAnswer
    from mismatch_ext.adapters.verl.driver.trainer import MismatchTrainer

    def answers(replicas: Any, block: Any, timeout: float) -> list[RolloutAnswer]:
        report = recorded("dense")["rollouts"][0]["reports"][0] | {"weight_version": replicas[0].sent}
        return [RolloutAnswer(engine="vllm", expected=1, reports=[report])]

    changed: Any = processes
    changed.read_rollouts, changed.refused_answers = answers, lambda replicas, timeout: None
    changed.plain_vocabulary = lambda tokenizer: torch.arange(3, 16)
    kind: Any = type("Trainer", (MismatchTrainer, StandIn), {})
    block = MismatchConfig.parse(BLOCK)
    assert block is not None
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as work:
        for name in ("first", "resumed"):
            config = host_config("algorithm.adv_estimator=grpo", f"trainer.default_local_dir={work}")
            with open_dict(config):
                hand_on(config, block, RunMode())
                config.algorithm.rollout_correction.rollout_rs = "token_k1"
            trainer = kind(config)
            if name == "resumed":
                trainer._load_checkpoint()
            trainer.init()
            logged: list[dict[str, Any]] = []
            trainer.fit(logged)
            found[name] = {
                "asked": trainer.actor_rollout_wg.asked, "logged": logged, "sent": trainer.sent,
                "coef": [entry["mismatch_kl_coef"] for entry in trainer.extra],
            }  # fmt: skip
        found["states"] = sorted(path.parent.name for path in Path(work).glob("global_step_*/mismatch.json"))
        (evidence_file,) = Path(work, "mismatch").glob("evidence-*")
        found["kept"] = [evidence_file.name, len(read_rollouts(evidence_file).responses)]
    return found
