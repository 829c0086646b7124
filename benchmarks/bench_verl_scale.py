"""What verl's driver and workers spend on a batch's gap and KL: work split over the workers, against all of it in the driver.

In the reference, the driver does everything: it takes every token, checks it, measures it, and computes the KL's baseline over
prompts. Both sides leave out verl's TransferQueue, which hands out the tokens. Two million tokens are measured. The times for a
batch of 268 million (1,024 prompts, 16 responses of 16k) are scaled up from these; only the driver's share, which depends on
nothing but ranks and responses, is measured at that size.
"""

from __future__ import annotations

import json
import logging
import pickle
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks._timing import paired
from mismatch_ext.config import KlConfig, MismatchConfig
from mismatch_ext.gap import gap_metrics, gap_sums
from mismatch_ext.kl import KlTerm, kl_baseline, kl_sums
from mismatch_ext.log import RunLog
from mismatch_ext.sums import Sums, merged

ROWS, ANSWERS, MEAN, TOP, PROMPT = 256, 16, 8192, 16384, 8
PARTS = 64
WHOLE = 1024 * 16 * 16384
"""Number of tokens in the batch to which times are extrapolated."""
WHOLE_ROWS = 1024 * 16
FIELDS = ("old_log_probs", "rollout_log_probs", "ref_log_prob", "response_mask")


def nested(parts: list[Tensor]) -> Tensor:
    """Return a tensor of ragged rows."""
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


class Batch:
    """A batch as it lies in verl's TransferQueue: ragged rows; the trainer's scores cover prompts too."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.clamp((torch.randn(ROWS, generator=generator) * 0.4 * MEAN + MEAN).long(), 16, TOP)
        self.lengths = [int(count) for count in drawn]
        self.tokens = sum(self.lengths)
        rollout = [-2 * torch.rand(count, generator=generator) for count in self.lengths]
        old = [row + 1e-3 * torch.randn(len(row), generator=generator) for row in rollout]
        reference = [row + 1e-1 * torch.randn(len(row), generator=generator) for row in old]
        masks = [torch.ones(count, dtype=torch.int64) for count in self.lengths]
        self.rows = dict(zip(FIELDS, (old, rollout, reference, masks), strict=True))
        # The score of a token stands one place before the token.
        self.scored = [torch.nn.functional.pad(row, (PROMPT - 1, 1)) for row in old]
        self.keys = [f"prompt{row // ANSWERS}_{row % ANSWERS}_0" for row in range(ROWS)]

    def fields(self, rows: slice, names: tuple[str, ...] = FIELDS) -> Any:
        """Return fields of some rows."""
        from tensordict import TensorDict

        given = {name: nested(self.rows[name][rows]) for name in names}
        return TensorDict(given, batch_size=len(self.lengths[rows]))


def peak_bytes(function: Callable[[], Any]) -> int:
    """Return the peak of torch's memory while a function runs, beyond its inputs, in bytes."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function()
    held = most = 0
    for event in recorded.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def gap_in_driver(data: Any) -> dict[str, float]:
    """Take every token of a batch, check it, and measure it."""
    padded = data.to_padded_tensor()
    rows = list(range(len(data)))
    old, rollout, mask = (padded[name][rows] for name in ("old_log_probs", "rollout_log_probs", "response_mask"))
    old, rollout, mask = old.float(), rollout.float(), mask.bool()
    assert not len((~rollout.isfinite() & mask).nonzero())
    return gap_metrics(gap_sums(old, rollout, mask))


def kl_in_driver(data: Any, keys: list[str], section: KlConfig) -> tuple[Sums, Tensor]:
    """Sum up the KL of a batch, and compute its baseline, with all rows at once."""
    from verl.workers.utils.padding import response_to_nested

    padded = data.to_padded_tensor()
    old, reference, mask = (padded[name] for name in ("old_log_probs", "ref_log_prob", "response_mask"))
    prompts = torch.from_numpy(np.unique([key.rsplit("_", 2)[0] for key in keys], return_inverse=True)[1])
    baseline = kl_baseline(old, reference, mask, section, groups=prompts)
    return kl_sums(old, reference, mask), response_to_nested(baseline, data["response_mask"])


def row(name: str, ours: float, theirs: float, equal: str) -> dict[str, Any]:
    """Return a row whose figures were measured elsewhere."""
    return {"name": name, "ours": ours, "theirs": theirs, "ratio": theirs / ours, "equal": equal}


def seconds_of(function: Callable[[], Any]) -> float:
    """Return the median time of a function."""
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return median(taken)


def run() -> list[dict[str, Any]]:
    """Return the rows of this benchmark."""
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    from mismatch_ext.adapters.verl.driver.kl import groups
    from mismatch_ext.adapters.verl.driver.measuring import MeasuringMixin
    from mismatch_ext.adapters.verl.worker.measuring import measured
    from mismatch_ext.adapters.verl.worker.spread import block_baseline, shares
    from verl import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask as verl_correct
    from verl.utils.debug.metrics import calculate_debug_metrics

    batch, term = Batch(), KlTerm(KlConfig(coef=1.0), 1.0)
    whole, million = batch.fields(slice(None)), batch.tokens / 1e6
    results = []

    with tempfile.TemporaryDirectory() as folder:
        driver: Any = MeasuringMixin()
        driver._log = RunLog(MismatchConfig(), Path(folder), info=dict, step=lambda: 1)
        driver.global_steps = 1
        driver.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(response_length=TOP)))

        def part_of(number: int, ranks: int) -> Any:
            size = ROWS // ranks
            rows = slice(number * size, number * size + size)
            return measured(
                batch.fields(rows, ("rollout_log_probs", "response_mask")),
                part=number,
                log_probs=nested(batch.scored[rows]),
            )

        def added_up(sent: bytes, keys: Any) -> dict[str, float]:
            driver.actor_rollout_wg = SimpleNamespace(mismatch_measured=lambda: pickle.loads(sent))
            gap, parts = driver._collected(keys)
            driver._known(keys, parts, gap_metrics(gap))
            driver._log.merge("train", gap)
            return gap_metrics(gap)

        keys = SimpleNamespace(keys=batch.keys, tags=[{}] * ROWS)
        parts = [part_of(number, PARTS) for number in range(PARTS)]
        sent = pickle.dumps(parts)
        expected, got = gap_in_driver(whole), added_up(sent, keys)
        worst = max(abs(got[name] - value) / max(abs(value), 1e-3) for name, value in expected.items())
        assert worst < 1e-12, worst
        same = f"all {len(expected)} measures, to 1e-12"
        gap = paired(
            f"verl's driver, gap of {batch.tokens} tokens, seconds: {PARTS} parts added up vs every token checked, measured",
            lambda: added_up(sent, keys),
            lambda: gap_in_driver(whole),
            equal=same,
            repeats=3,
        )
        driver_bytes = row(
            "the same: peak bytes of the driver for each million tokens (ours has no more for more tokens)",
            max(peak_bytes(lambda: added_up(sent, keys)), len(sent)) / million,
            peak_bytes(lambda: gap_in_driver(whole)) / million,
            same,
        )
        part = batch.fields(slice(0, ROWS // 8))
        part_tokens = sum(batch.lengths[: ROWS // 8])
        worker = paired(
            f"a rank's part of {part_tokens} tokens, seconds: measured by its worker vs by the driver's way",
            lambda: part_of(0, 8),
            lambda: gap_in_driver(part),
            equal=same,
            repeats=5,
        )
        worker_bytes = row(
            "the same: peak bytes for each million tokens (a million places are measured together, however many there are)",
            peak_bytes(lambda: part_of(0, 8)) / part_tokens * 1e6,
            peak_bytes(lambda: gap_in_driver(part)) / part_tokens * 1e6,
            same,
        )
        results += [gap, driver_bytes, worker, worker_bytes]

        # The driver's share of the large batch depends only on ranks and responses.
        large: dict[int, bytes] = {}
        for ranks in (64, 512):
            count = WHOLE_ROWS // ranks
            numbers = {"tokens": [TOP] * count, "lengths": [TOP] * count}
            large[ranks] = pickle.dumps([replace(parts[n % PARTS], part=n, **numbers) for n in range(ranks)])
        many = SimpleNamespace(
            keys=[f"prompt{n // ANSWERS}_{n % ANSWERS}_0" for n in range(WHOLE_ROWS)], tags=[{}] * WHOLE_ROWS
        )
        of_ranks = {ranks: seconds_of(partial(added_up, given, many)) for ranks, given in large.items()}

    def kl_of_blocks() -> tuple[Sums, list[Tensor]]:
        sums, found = [], []
        for group in groups(batch.keys):
            first = batch.keys.index(group[0])
            padded = batch.fields(slice(first, first + len(group))).to_padded_tensor()
            sums.append(kl_sums(*(padded[n] for n in ("old_log_probs", "ref_log_prob", "response_mask"))))
            values = block_baseline(padded, term.config, torch.zeros(len(group), dtype=torch.long))
            found += [value[:count] for value, count in zip(values, batch.lengths[first:], strict=False)]
        return merged(*sums), found

    def kl_of_driver(names: list[str], ranks: int) -> dict[str, float]:
        handed = shares(groups(names), ranks)
        term.begin()
        return term.add(kl_sums(torch.ones(len(handed)), torch.zeros(len(handed)), torch.ones(len(handed))))

    sums, baseline = kl_in_driver(whole, batch.keys, term.config)
    block_sums, blocks = kl_of_blocks()
    assert all(torch.isclose(sums[n], block_sums[n], rtol=1e-12, atol=0) for n in sums), (sums, block_sums)
    assert all(torch.allclose(a, b, rtol=1e-6, atol=0) for a, b in zip(baseline.unbind(), blocks, strict=True))
    exact = sum(int((a != b).sum()) for a, b in zip(baseline.unbind(), blocks, strict=True))
    same_kl = f"the sums to 1e-12, and the float32 baseline of all tokens but {exact} to the last bit"
    kl = paired(
        f"verl's driver, KL and its baseline of {batch.tokens} tokens, seconds: prompts handed out vs all of it there",
        lambda: kl_of_driver(batch.keys, PARTS),
        lambda: kl_in_driver(whole, batch.keys, term.config),
        equal=same_kl,
        repeats=3,
    )
    kl_worker = paired(
        f"KL and its baseline of {batch.tokens} tokens, seconds of all workers together: prompt by prompt vs whole",
        kl_of_blocks,
        lambda: kl_in_driver(whole, batch.keys, term.config),
        equal=same_kl,
        repeats=3,
    )
    kl_bytes = row(
        "the same: peak bytes for each million tokens (a prompt's responses are held, however many prompts there are)",
        peak_bytes(kl_of_blocks) / million,
        peak_bytes(lambda: kl_in_driver(whole, batch.keys, term.config)) / million,
        same_kl,
    )
    results += [kl, kl_worker, kl_bytes]

    padded = whole.to_padded_tensor()
    old, rollout, mask = (padded[name] for name in ("old_log_probs", "rollout_log_probs", "response_mask"))
    proto = DataProto(batch=padded.clone())
    proto.batch["responses"] = mask
    for name, function in {
        "rollout_corr": lambda: verl_correct(old, rollout, mask, "token", 2.0, False, None, None),
        "calculate_debug_metrics": lambda: calculate_debug_metrics(proto),
    }.items():
        results.append(
            row(
                f"verl's driver, seconds for {batch.tokens} tokens: our gap vs verl's own {name}, which stays",
                gap["ours"],
                seconds_of(function),
                "not compared: other measures, for which verl's driver has every token",
            )
        )

    before = (gap["theirs"] + kl["theirs"]) / batch.tokens * WHOLE
    of_kl = seconds_of(partial(kl_of_driver, many.keys, 512))
    for ranks, seconds in of_ranks.items():
        results.append(
            row(
                f"on paper, {WHOLE / 1e6:.0f} million tokens on {ranks} ranks: the driver's seconds for gap and KL",
                seconds + of_kl,
                before,
                "not compared: by proportion",
            )
        )
        each = (worker["ours"] / part_tokens + kl_worker["ours"] / batch.tokens) * WHOLE / ranks
        results.append(
            row(
                f"on paper, the same: a worker's seconds on a core of this machine, beside the driver's before ({ranks} ranks)",
                each,
                before,
                "not compared: by proportion",
            )
        )
    return results


if __name__ == "__main__":
    for line in run():
        print(json.dumps(line))
