"""Truth of every token in a run of verl: scored by the weights that sampled it, whatever the product itself scores.

A module that `VERL_USE_EXTERNAL_MODULES` names. In the driver it keeps the weights of every version and dumps, for each batch,
all log-probabilities at the scoring version and at each token's own. In the workers it plants a fault of the trainer's numerics
from a version of the weights on: a temperature.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch

from tests.peers.verl.cpu.after_import import AfterImport

DUMP, FAULT_FROM, TEMPERATURE = "VERL_CPU_DUMP_VERSIONS", "VERL_CPU_FAULT_FROM", 0.98
ALL = 1000


def _dump_truth(module: Any) -> None:
    """Let the driver score every token of a batch by its own version, after the product has measured what it measures."""
    import transfer_queue as tq
    from mismatch_ext.adapters.verl.worker.staleness import segments_of
    from verl.workers.utils.padding import response_from_nested

    from mismatch_ext.staleness import token_versions

    measure = module.StalenessMixin._measure_parts

    def measured(self: Any, batch: Any) -> None:
        measure(self, batch)
        now, workers = self._version, self.actor_rollout_wg
        workers.mismatch_keep_weights(now, ALL)

        def read(name: str) -> Any:
            return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[name])[name]

        nested = read("response_mask")
        mask, prompts = nested.to_padded_tensor(0).bool(), read("prompts").offsets().diff().tolist()
        segments = [segments_of(row, size) for row, size in zip(list(read("extra_fields")), prompts, strict=True)]
        versions, own = token_versions(segments, mask), torch.zeros(mask.shape)
        given = batch.extra_info
        for version in sorted(set(versions[mask].tolist())):
            workers.mismatch_use_weights(version)
            batch.extra_info = {"calculate_entropy": False, "compute_loss": False, "temperature": 1.0}
            workers.compute_log_prob(batch)
            scored = response_from_nested(read("log_probs"), nested).to_padded_tensor(0.0)
            own = torch.where(versions == version, scored.float(), own)
        batch.extra_info = given
        workers.mismatch_use_weights(now)
        both = {name: read(f"{name}_log_probs").to_padded_tensor(0.0).float() for name in ("old", "rollout")}
        dump = {"mask": mask, "versions": versions, "own": own, **both, "now": now}
        torch.save(dump, Path(os.environ[DUMP]) / f"{self.global_steps}.pt")

    module.StalenessMixin._measure_parts = measured


def _plant_temperature(module: Any) -> None:
    """Let the trainer score at another temperature than it is told, from a version of the weights on."""
    from verl.utils import tensordict_utils as tu

    infer = module.TrainingWorker.infer_batch

    @functools.wraps(infer)
    def inferred(self: Any, data: Any) -> Any:
        version = getattr(self.engine, "weight_version", None)
        if version is not None and version >= int(os.environ.get(FAULT_FROM, ALL)):
            tu.assign_non_tensor(data, temperature=TEMPERATURE)
        return infer(self, data)

    module.TrainingWorker.infer_batch = inferred


AfterImport("mismatch_ext.adapters.verl.driver.staleness", _dump_truth)
AfterImport("verl.workers.engine_workers", _plant_temperature)
