"""Truth of every token in a run of verl: scored by the weights that sampled it, whatever the product itself scores.

A module that `VERL_USE_EXTERNAL_MODULES` names. In the driver it dumps, for each batch, all log-probabilities at the scoring
version and at each token's own, and for finished rollouts of the present version in the buffer theirs. In the workers it keeps
the weights of every version, and plants a fault from one on: of the trainer's numerics, a temperature; or of training, a rate.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.peers.verl.cpu.after_import import AfterImport

DUMP = "VERL_CPU_DUMP_VERSIONS"
COLDER_FROM, TEMPERATURE = "VERL_CPU_COLDER_FROM", 0.98
FASTER_FROM, TIMES = "VERL_CPU_FASTER_FROM", 30.0
"""Version of the weights from which on the trainer scores at a temperature, and its rate is so many times what it is told."""
ALL = 1000


def _dump_truth(module: Any) -> None:
    """Let the driver score every token of a batch by its own version, after the product has measured what it measures."""
    import transfer_queue as tq
    from mismatch_ext.adapters.verl.worker.staleness import segments_of
    from verl.workers.utils.padding import response_from_nested

    from mismatch_ext.staleness import token_versions

    measure = module.StalenessMixin._measure_parts

    def read(rows: Any, name: str) -> Any:
        return tq.kv_batch_get(keys=rows.keys, partition_id=rows.partition_id, select_fields=[name])[name]

    def scored(self: Any, rows: Any) -> tuple[Tensor, Tensor]:
        """Score rows with the weights that the actor has, and return log-probabilities and mask of the responses `[B, T]`."""
        given = rows.extra_info
        rows.extra_info = {"calculate_entropy": False, "compute_loss": False, "temperature": 1.0}
        self.actor_rollout_wg.compute_log_prob(rows)
        rows.extra_info, nested = given, read(rows, "response_mask")
        found = response_from_nested(read(rows, "log_probs"), nested).to_padded_tensor(0.0).float()
        return found, nested.to_padded_tensor(0).bool()

    def buffered(self: Any, batch: Any) -> dict[str, Tensor] | None:
        """Return those of the finished rollouts of the present version that the batch has not taken."""
        self.replay_buffer._sync_metadata_from_transfer_queue()
        now, taken = self._version, set(batch.keys)
        tags = {
            key: tag
            for key, tag in self.replay_buffer.partitions[batch.partition_id].items()
            if key not in taken and tag.get("status") == "success"
        }
        keys = [key for key, tag in tags.items() if tag["min_global_steps"] == tag["max_global_steps"] == now]
        keys = keys[: len(keys) // self._unit * self._unit]
        if not keys:
            return None
        rows = module.KVBatchMeta(partition_id=batch.partition_id, keys=keys, tags=[tags[key] for key in keys])
        own, mask = scored(self, rows)
        return {"own": own, "mask": mask, "rollout": read(rows, "rollout_log_probs").to_padded_tensor(0.0).float()}

    def measured(self: Any, batch: Any) -> None:
        measure(self, batch)
        now, workers = self._version, self.actor_rollout_wg
        buffer = buffered(self, batch)
        nested = read(batch, "response_mask")
        mask, prompts = nested.to_padded_tensor(0).bool(), read(batch, "prompts").offsets().diff().tolist()
        parts = zip(list(read(batch, "extra_fields")), prompts, strict=True)
        versions = token_versions([segments_of(row, size) for row, size in parts], mask)
        own = torch.zeros(mask.shape)
        for version in sorted(set(versions[mask].tolist())):
            workers.mismatch_use_weights(version)
            own = torch.where(versions == version, scored(self, batch)[0], own)
        workers.mismatch_use_weights(now)
        both = {name: read(batch, f"{name}_log_probs").to_padded_tensor(0.0).float() for name in ("old", "rollout")}
        dump = {"mask": mask, "versions": versions, "own": own, **both, "now": now, "buffer": buffer}
        torch.save(dump, Path(os.environ[DUMP]) / f"{self.global_steps}.pt")

    module.StalenessMixin._measure_parts = measured


def _keep_all(module: Any) -> None:
    """Let workers forget no version, and name to the product those alone that it has asked for."""
    keep, kept = module.KeptWeights.keep, module.KeptWeights.versions.fget

    def kept_all(self: Any, model: Any, version: int, count: int) -> None:
        self._asked = None
        keep(self, model, version, ALL)
        self._asked = count

    def last(self: Any) -> list[int]:
        versions: list[int] = kept(self)
        asked = getattr(self, "_asked", None)
        return versions if asked is None else versions[-asked - 1 :]

    module.KeptWeights.keep, module.KeptWeights.versions = kept_all, property(last)


def _plant_faults(module: Any) -> None:
    """Let the trainer score at another temperature, or train at another rate, from a version of the weights on."""
    from verl.utils import tensordict_utils as tu

    infer, train = module.TrainingWorker.infer_batch, module.TrainingWorker.train_mini_batch

    def since(self: Any, start: str) -> bool:
        version = getattr(self.engine, "weight_version", None)
        return version is not None and version >= int(os.environ.get(start, ALL))

    @functools.wraps(infer)
    def inferred(self: Any, data: Any) -> Any:
        if since(self, COLDER_FROM):
            tu.assign_non_tensor(data, temperature=TEMPERATURE)
        return infer(self, data)

    @functools.wraps(train)
    def trained(self: Any, data: Any) -> Any:
        if since(self, FASTER_FROM):
            for group in self.engine.optimizer.param_groups:
                group["lr"] *= TIMES
        return train(self, data)

    module.TrainingWorker.infer_batch, module.TrainingWorker.train_mini_batch = inferred, trained


AfterImport("mismatch_ext.adapters.verl.driver.staleness", _dump_truth)
AfterImport("mismatch_ext.adapters.torch.kept", _keep_all)
AfterImport("verl.workers.engine_workers", _plant_faults)
