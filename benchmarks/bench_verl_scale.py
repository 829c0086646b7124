"""What verl's driver spends on a batch's gap, KL and baseline, beside what verl itself spends on the same batch there.

Both sides start from the rows that verl's TransferQueue hands out; the queue itself is left out. Ours takes 64 rows at a time,
and verl's `rollout_corr` and `calculate_debug_metrics` take the whole batch, padded. Above 4 million tokens the gap's means are
those of a sample of rows. Seconds are those of one processor core. `python -m benchmarks.bench_verl_scale 2` measures a batch of
2 million tokens alone.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mismatch_ext.config import KlConfig
from mismatch_ext.gap import MEANS_OF, gap_metrics, gap_sums, rows_of_means
from mismatch_ext.sums import merged

ANSWERS, MEAN, TOP = 16, 8192, 16384
STEP = 1
FIELDS = ("old_log_probs", "rollout_log_probs", "ref_log_prob", "response_mask")


def nested(parts: list[Tensor]) -> Tensor:
    """Return a tensor of ragged rows."""
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


class Queue:
    """A batch as it lies in verl's TransferQueue: ragged rows by key."""

    def __init__(self, millions: float) -> None:
        generator = torch.Generator().manual_seed(0)
        rows = max(ANSWERS, round(millions * 1e6 / MEAN / ANSWERS) * ANSWERS)
        lengths = torch.clamp((torch.randn(rows, generator=generator) * 0.4 * MEAN + MEAN).long(), 16, TOP).tolist()
        rollout = [-2 * torch.rand(count, generator=generator) for count in lengths]
        old = [row + 1e-3 * torch.randn(len(row), generator=generator) for row in rollout]
        reference = [row + 1e-1 * torch.randn(len(row), generator=generator) for row in old]
        masks = [torch.ones(count, dtype=torch.int64) for count in lengths]
        self.lengths = torch.tensor(lengths)
        self.tokens = sum(lengths)
        self._rows = dict(zip(FIELDS, (old, rollout, reference, masks), strict=True))
        self.keys = [f"prompt{row // ANSWERS}_{row % ANSWERS}_0" for row in range(rows)]
        self._place = {key: row for row, key in enumerate(self.keys)}

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        """Return fields of some rows, those that there are."""
        from tensordict import TensorDict

        there = [name for name in select_fields if name in self._rows]  # as verl's, which leaves out what no row has
        given = {name: nested([self._rows[name][self._place[key]] for key in keys]) for name in there}
        return TensorDict(given, batch_size=len(keys))

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: Any) -> None:
        """Take fields of some rows, and drop them."""


def cost(function: Callable[[], Any]) -> tuple[float, int]:
    """Return the fewest processor seconds of two rounds, and the peak of torch's memory beyond its inputs, in bytes."""
    from torch.profiler import ProfilerActivity, profile

    rounds = []
    for _ in range(2):
        start = time.process_time()
        function()
        rounds.append(time.process_time() - start)
    seconds = min(rounds)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function()
    held = most = 0
    for event in recorded.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return seconds, most


def run(sizes: tuple[float, ...] = (2, 20), whole: float | None = None) -> list[dict[str, Any]]:
    """Return the rows of this benchmark, for batches of so many million tokens, or for such a part of a `whole` batch."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    return [row for millions in sizes for row in _of_size(millions, millions if whole is None else whole)]


def _of_size(millions: float, whole: float) -> list[dict[str, Any]]:
    from mismatch_ext.adapters.verl import measure
    from verl import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
    from verl.utils.debug.metrics import calculate_debug_metrics

    queue = Queue(millions)
    measure.tq = queue
    tags = [{"response_len": count} for count in queue.lengths.tolist()]
    batch = SimpleNamespace(keys=queue.keys, tags=tags, partition_id="train")
    measure.MEANS_OF = round(MEANS_OF * millions / whole)  # as many as fall on such a part of the whole
    section = KlConfig(coef=1.0)

    def ours() -> Any:
        bad = measure.BadKeys(batch)
        return measure.measure(batch, STEP, measure.Scoring(), bad, longest=TOP, reference=True, kl=section)

    def theirs() -> None:
        padded = queue.kv_batch_get(queue.keys, "train", list(FIELDS)).to_padded_tensor()
        old, rollout, mask = (padded[name] for name in ("old_log_probs", "rollout_log_probs", "response_mask"))
        compute_rollout_correction_and_rejection_mask(old, rollout, mask, "token", 2.0, False, None, None)
        proto = DataProto(batch=padded)
        proto.batch["responses"] = mask
        calculate_debug_metrics(proto)

    gap = ours().gap
    fields = queue.kv_batch_get(queue.keys, "train", list(FIELDS))
    old, rollout, mask = (fields[name].values() for name in ("old_log_probs", "rollout_log_probs", "response_mask"))
    means = rows_of_means(queue.lengths, STEP, measure.MEANS_OF)
    sums = gap_sums(old=old, rollout=rollout, mask=mask, lengths=queue.lengths, means=means)
    expected, got = gap_metrics(merged(sums)), gap_metrics(gap)
    worst = max(abs(got[name] - value) / max(abs(value), 1e-3) for name, value in expected.items())
    assert worst < 1e-9, worst
    del fields, old, rollout, mask
    (mine, my_bytes), (verls, verls_bytes) = cost(ours), cost(theirs)
    equal = (
        f"all {len(expected)} measures as of the whole batch and the same sample, to 1e-9; verl's are other measures"
    )
    name = f"verl's driver, {queue.tokens / 1e6:.1f} million tokens: our gap, KL and baseline vs verl's own metrics"
    per = queue.tokens / 1e6
    return [
        {"name": f"{name}, seconds for each million", "ours": mine / per, "theirs": verls / per, "equal": equal},
        {"name": f"{name}, peak bytes", "ours": my_bytes, "theirs": verls_bytes, "equal": equal},
    ]


if __name__ == "__main__":
    for line in run(tuple(map(float, sys.argv[1:])) or (2, 20)):
        print(json.dumps(line | {"ratio": round(line["theirs"] / line["ours"], 2)}))
