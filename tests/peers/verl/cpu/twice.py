"""A training step of verl's driver that is taken with bad rows, and again from the same state with the rows good and weightless.

What asynchronous modes sample is not the same in two runs. So the rows are spoiled in verl's queue once a batch is drawn, and the
same process takes the step several times from one checkpoint of the actor. `VERL_CPU_TWICE` names rows and kinds by step, such
as `{"2": {"1": "rollout", "5": "old"}}`, and the file that gets a line for each step.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from tests.peers.verl.cpu.after_import import AfterImport

TWICE = "VERL_CPU_TWICE"
"""Environment variable with "steps" and "file", as JSON."""

NAN = float("nan")
AHEAD = 99
"""A version of the weights that no run of a few steps reaches."""

Fields = dict[str, Any]


def rollout(rows: Fields) -> None:
    """Let the engine's log-probability of the first token be not a number."""
    rows["rollout_log_probs"][0] = NAN


def tokens(rows: Fields) -> None:
    """Let what the engine sampled be of other tokens."""
    for request in rows["extra_fields"]["sampled_tokens"]:
        request[3] += 1


def routes(rows: Fields) -> None:
    """Let the first token's routes be of another token: an expert's id is left, and the digest of the token is not."""
    rows["routed_experts"][0] = rows["routed_experts"][1]


def mask(rows: Fields) -> None:
    """Let the sampling mask of the first token lack the token that was sampled."""
    size = int(rows["sampling_mask_sizes"][0])
    sampled = int(rows["responses"][0])
    ids = rows["sampling_mask_ids"]
    ids[:size] = (sampled + 1 + ids[:size] - ids[:size].min()) % 16


FIELDS: dict[str, tuple[Callable[[Fields], None], tuple[str, ...]]] = {
    "rollout": (rollout, ("rollout_log_probs",)),
    "tokens": (tokens, ("extra_fields",)),
    "routes": (routes, ("routed_experts",)),
    "mask": (mask, ("sampling_mask_ids", "sampling_mask_sizes", "responses")),
}
"""What spoils a row in the queue, and the fields that it needs. `version` is a tag, and passes write `old` and `reference`."""
WRITTEN = {"old": "old_log_probs", "reference": "ref_log_prob"}
"""Log-probabilities that a pass of the trainer writes, of which the first becomes not a number."""
COMPARING = ("clip_cov", "kl_cov")
"""Losses of verl's that choose tokens by comparing all of a micro-batch's: a mask would change which they choose."""


class Twice:
    """The steps of a driver that are taken several times."""

    def __init__(self, steps: dict[str, dict[str, str]], file: str) -> None:
        self._steps, self._file = steps, Path(file)
        self._spoils = False  # whether the present pass is the one with bad rows
        self._kept: list[tuple[str, Any]] = []  # key and fields of spoiled rows, as they were
        self._drawn: Any = None  # the batch as it was drawn
        self._masks: Any = None

    def kinds(self, trainer: Any) -> dict[int, str]:
        """Return what is to be spoiled in the present update, by the row's number."""
        last = trainer.local_trigger_step == trainer.parameter_sync_step - 1
        chosen = self._steps.get(str(trainer.global_steps), {}) if last else {}
        return {int(row): kind for row, kind in chosen.items()}

    def draw(self, trainer: Any, batch: Any) -> None:
        """Keep a batch that was drawn, and spoil its rows."""
        from verl.trainer.ppo.v1 import trainer_base

        tq = trainer_base.tq
        self._drawn = copy.deepcopy(batch)
        self._masks = get(tq, batch, batch.keys, ("response_mask",))
        self._kept, self._spoils = [], True
        for row, kind in self.kinds(trainer).items():
            if kind == "version":
                batch.tags[row]["min_global_steps"] = batch.tags[row]["max_global_steps"] = AHEAD
            if kind not in FIELDS:
                continue
            spoil, names = FIELDS[kind]
            fields = unpacked(get(tq, batch, [batch.keys[row]], names))
            self._kept.append((batch.keys[row], copy.deepcopy(fields)))
            spoil(fields)
            put(tq, batch, [batch.keys[row]], fields)

    def write_nan(self, trainer: Any, batch: Any, kind: str) -> None:
        """Let the first of a pass's log-probabilities be not a number in the rows of a kind."""
        from verl.trainer.ppo.v1 import trainer_base

        tq = trainer_base.tq
        if not self._spoils:
            return
        for row, chosen in self.kinds(trainer).items():
            if chosen != kind:
                continue
            key = self._drawn.keys[row]
            fields = unpacked(get(tq, batch, [key], (WRITTEN[kind],)))
            fields[WRITTEN[kind]][0] = NAN
            put(tq, batch, [key], fields)

    def update(self, trainer: Any, batch: Any, metrics: dict[str, Any], stages: dict[str, Any]) -> Any:
        """Take the step with bad rows, then with the same rows good and weightless, then with all rows good."""
        bad = trainer._bad.rows
        folder = self._file.parent / f"twice-{trainer.global_steps}"
        start, spoiled = folder / "start", folder / "spoiled"
        weights = {"before": save(trainer, start)}
        result = stages["_update_actor"](trainer, batch, metrics)
        norms = {"spoiled": metrics["actor/grad_norm"]}
        weights["spoiled"] = save(trainer, spoiled)
        self._spoils = False
        chosen = [self._drawn.keys[row] for row in self.kinds(trainer)]
        # The rows of the step are counted once.
        with mock.patch.object(trainer._log, "count_bad_rows"):
            for name, weightless in (("weightless", chosen), ("whole", [])):
                load(trainer, start)
                norms[name] = self._again(trainer, stages, weightless)
                weights[name] = save(trainer, folder / name)
        load(trainer, spoiled)
        said = {
            "step": trainer.global_steps,
            "rows": bad.size,
            "bad": {str(row): [fault.reason, fault.message] for row, fault in bad.faults.items()},
            "norms": norms,
            "weights": weights,
            "apart": {name: apart(folder / name, spoiled) for name in ("weightless", "whole")},
        }
        with self._file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(said) + "\n")
        return result

    def _again(self, trainer: Any, stages: dict[str, Any], weightless: list[str]) -> float:
        """Take the step of the drawn batch with good rows, of which some have loss weight 0; return the gradient's norm."""
        from mismatch_ext.adapters.verl.bad_rows import BAD, FAULT, marks
        from tensordict import TensorDict
        from verl.trainer.ppo.v1 import trainer_base

        tq, batch, metrics = trainer_base.tq, copy.deepcopy(self._drawn), dict[str, Any]()
        for key, fields in self._kept:
            put(tq, batch, [key], fields)
        fields = {"response_mask": self._masks["response_mask"], BAD: marks([False] * len(batch.keys))}
        known = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[FAULT])
        if known.get(FAULT, None) is not None:
            fields[FAULT] = known[FAULT] * 0
        tq.kv_batch_put(
            keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(fields, batch_size=len(batch.keys))
        )
        for name in ("_compute_old_log_prob", "_compute_ref_log_prob", "_compute_advantage"):
            if name != "_compute_ref_log_prob" or trainer.use_reference_policy:
                batch = stages[name](trainer, batch, metrics)
        if trainer.config.actor_rollout_ref.actor.policy_loss.loss_mode in COMPARING:
            weigh(tq, batch, weightless)
        elif weightless:
            data = get(tq, batch, weightless, ("response_mask",))
            data["response_mask"] = data["response_mask"] * 0
            tq.kv_batch_put(keys=weightless, partition_id=batch.partition_id, fields=data)
        stages["_update_actor"](trainer, batch, metrics)
        return float(metrics["actor/grad_norm"])


def get(tq: Any, batch: Any, keys: list[str], names: tuple[str, ...]) -> Any:
    """Return fields of some rows."""
    return tq.kv_batch_get(keys=list(keys), partition_id=batch.partition_id, select_fields=list(names))


def weigh(tq: Any, batch: Any, weightless: list[str]) -> None:
    """Give all rows the weights that verl's rollout correction has: 0 for some, 1 for the others."""
    import torch
    from tensordict import TensorDict

    masks = get(tq, batch, batch.keys, ("response_mask",))["response_mask"].unbind()
    weights = [
        torch.full((len(mask),), float(key not in weightless)) for key, mask in zip(batch.keys, masks, strict=True)
    ]
    fields = {"rollout_is_weights": torch.nested.as_nested_tensor(weights, layout=torch.jagged)}
    tq.kv_batch_put(
        keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(fields, batch_size=len(weights))
    )
    if batch.fields is not None:  # the fields that workers fetch
        batch.fields = [*{*batch.fields, *fields}]


def unpacked(data: Any) -> Fields:
    """Return the fields of one row, which may be changed in place."""
    found: Fields = {}
    for name in list(data.keys()):
        value = data.pop(name)
        found[name] = copy.deepcopy(value.tolist()[0]) if name == "extra_fields" else value.unbind()[0].clone()
    return found


def put(tq: Any, batch: Any, keys: list[str], fields: Fields) -> None:
    """Put the fields of one row into the queue."""
    import torch
    from tensordict import NonTensorData, NonTensorStack, TensorDict

    packed: Fields = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            packed[name] = NonTensorStack(NonTensorData(value))
        else:
            packed[name] = torch.nested.as_nested_tensor([value], layout=torch.jagged)
    tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=TensorDict(packed, batch_size=1))


def save(trainer: Any, folder: Path) -> str:
    """Save the actor as verl's driver does, and return a digest of its weights and its optimizer's state."""
    import torch

    from tests.peers.death import plain

    trainer.actor_rollout_wg.save_checkpoint(str(folder), None, trainer.global_steps, max_ckpt_to_keep=None)
    digest = hashlib.sha256()
    for name in ("model", "optim"):
        saved = torch.load(folder / f"{name}_world_size_1_rank_0.pt", weights_only=False)
        digest.update(repr(plain(saved)).encode())
    return digest.hexdigest()


def apart(folder: Path, other: Path) -> float:
    """Return the largest difference between the weights of two saved actors."""
    import torch

    name = "model_world_size_1_rank_0.pt"
    saved, others = (torch.load(path / name, weights_only=False) for path in (folder, other))
    pairs = [(value.to_local(), others[key].to_local()) for key, value in saved.items()]
    return max(float((value - second).abs().max()) for value, second in pairs)


def load(trainer: Any, folder: Path) -> None:
    """Load the actor as verl's driver does."""
    trainer.actor_rollout_wg.load_checkpoint(local_path=str(folder), del_local_after_load=False)


def take_twice() -> None:
    """Let the driver take the chosen steps several times."""
    twice = Twice(**json.loads(os.environ[TWICE]))
    stages: dict[str, Any] = {}

    def change_ours(module: Any) -> None:
        kind = module.MismatchTrainer
        names = ("_compute_old_log_prob", "_compute_ref_log_prob", "_compute_advantage", "_update_actor")
        stages.update({name: getattr(kind, name) for name in names})

        def compute(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
            if twice.kinds(self):
                twice.draw(self, batch)
            return stages["_compute_old_log_prob"](self, batch, metrics)

        def update(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
            if twice.kinds(self):
                return twice.update(self, batch, metrics, stages)
            return stages["_update_actor"](self, batch, metrics)

        kind._compute_old_log_prob, kind._update_actor = compute, update

    def change_verls(module: Any) -> None:
        for name, kind in (("_compute_old_log_prob", "old"), ("_compute_ref_log_prob", "reference")):
            spoil_after(module.PPOTrainer, name, kind)

    def spoil_after(trainer: Any, name: str, kind: str) -> None:
        original = getattr(trainer, name)

        def compute(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
            result = original(self, batch, metrics)
            if twice.kinds(self):
                twice.write_nan(self, result, kind)
            return result

        setattr(trainer, name, compute)

    AfterImport("mismatch_ext.adapters.verl.driver.trainer", change_ours)
    AfterImport("verl.trainer.ppo.v1.trainer_base", change_verls)
