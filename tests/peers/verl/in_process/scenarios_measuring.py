"""What verl's driver measures of a batch, in chunks of rows, without Ray: the queue is a dictionary of rows."""

from __future__ import annotations

import tempfile
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from mismatch_ext.adapters.verl import evidence as module
from mismatch_ext.adapters.verl import measure
from mismatch_ext.adapters.verl.driver import batch_checks
from mismatch_ext.adapters.verl.evidence import StoredBatch
from mismatch_ext.adapters.verl.measure import OLD, SCORED, BadKeys, Measured, Scoring, segments_of
from mismatch_ext.adapters.verl.replay import versions
from mismatch_ext.adapters.verl.rollout.client import SAMPLED, SETTINGS
from mismatch_ext.adapters.verl.rollout.digests import numbers, with_digests
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from mismatch_ext.config import KlConfig, MismatchConfig
from mismatch_ext.drift import drift_metrics
from mismatch_ext.evidence import lines_of
from mismatch_ext.gap import gap_metrics, gap_profiles, gap_sample, gap_sums, rows_of_means
from mismatch_ext.kl import kl_sums
from mismatch_ext.log import RunLog
from mismatch_ext.rollout import SamplingSettings
from tests.peers.verl.in_process.routes import nested, refused

PROMPTS, RESPONSES = (6, 5, 4, 6, 3, 7, 5), (8, 17, 6, 3, 1, 30, 12)
FILLED_UP = 4
"""The row that verl has filled the batch up with, of no sampled token."""
STEP = 4


class Queue:
    """Rows by key, as verl's TransferQueue hands them out."""

    def __init__(self, rows: dict[str, list[Any]]) -> None:
        self.rows = rows
        self.keys = [f"prompt_{row}_0" for row in range(len(rows["response_mask"]))]
        self.most = 0  # rows that were fetched together
        self.fetched: list[tuple[str, ...]] = []  # fields that were asked for, once for each row

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        self.most = max(self.most, len(keys))
        self.fetched += len(keys) * [tuple(select_fields)]
        chosen = [self.keys.index(key) for key in keys]
        fields = {name: [self.rows[name][row] for row in chosen] for name in select_fields if name in self.rows}
        return TensorDict(
            {n: nested(v) if isinstance(v[0], Tensor) else NonTensorStack(*v) for n, v in fields.items()},
            batch_size=len(keys),
        )

    def get_client(self) -> Any:
        return self

    def kv_retrieve_meta(self, keys: list[str], partition_id: str) -> Any:
        chosen = [self.keys.index(key) for key in keys]
        names = [name for name, rows in self.rows.items() if all(rows[row] is not None for row in chosen)]
        return SimpleNamespace(field_names=names)

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: TensorDict) -> None:
        for name, values in fields.items():
            row_of = dict(zip(keys, values.unbind(), strict=True))
            known = self.rows.setdefault(name, [None] * len(self.keys))
            self.rows[name] = [row_of.get(key, value) for key, value in zip(self.keys, known, strict=True)]


def queue(seed: int = 0) -> Queue:
    """Return a batch with a tool's tokens between the policy's."""
    generator = torch.Generator().manual_seed(seed)
    rows: dict[str, list[Any]] = {n: [] for n in ("response_mask", "rollout_log_probs", "log_probs", "ref_log_prob")}
    rows["prompts"] = [torch.arange(prompt) + 1 for prompt in PROMPTS]
    rows["responses"] = [torch.arange(response) + 20 for response in RESPONSES]
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        mask = torch.ones(response, dtype=torch.int64)
        mask[5:9] = 0
        rows["response_mask"].append(torch.zeros_like(mask) if row == FILLED_UP else mask)
        rows["rollout_log_probs"].append(-2 * torch.rand(response, generator=generator))
        found = -2 * torch.rand(prompt + response, generator=generator)
        # The token at a place is scored by the row before it.
        found[prompt - 1 : -1] = rows["rollout_log_probs"][-1] + 0.01 * torch.randn(response, generator=generator)
        rows["log_probs"].append(found)
        rows["ref_log_prob"].append(found[prompt - 1 : -1] + 0.1 * torch.randn(response, generator=generator))
    rows[OLD] = [row[prompt - 1 : -1] for prompt, row in zip(PROMPTS, rows["log_probs"], strict=True)]
    return Queue(rows)


def batch(given: Queue) -> Any:
    """Return verl's keys of the batch."""
    tags = [{"is_padding": row == FILLED_UP, "prompt_len": PROMPTS[row]} for row in range(len(given.keys))]
    return SimpleNamespace(keys=given.keys, tags=tags, partition_id="train")


def measured(given: Queue, scoring: Scoring | None, chunk: int = 3, sample: int = 0, bad: Any = None) -> Measured:
    """Measure a batch, so many rows at a time; its bad rows are added to `bad`."""
    measure.tq, measure.CHUNK = given, chunk
    bad = BadKeys(batch(given)) if bad is None else bad
    return measure.measure(batch(given), STEP, scoring, bad, longest=17, sample=sample, seed=5)


def told(bad: Any) -> list[list[str]]:
    """Return reason and message of each bad row."""
    return [[fault.reason, fault.message] for _, fault in sorted(bad.rows.faults.items())]


def figures(sums: Any) -> dict[str, Any]:
    """Return everything that is measured."""
    return {"scalars": gap_metrics(sums), "profiles": gap_profiles(sums)}


def chunks() -> dict[str, Any]:
    """Compare what is measured chunk by chunk, of either field of scores, with what is measured of the whole, padded."""
    rows = queue().rows
    mask = nested(rows["response_mask"]).to_padded_tensor(0).bool()
    rollout, old = (nested(rows[name]).to_padded_tensor(0.0) for name in ("rollout_log_probs", OLD))
    found: dict[str, Any] = {"whole": figures(gap_sums(old=old, rollout=rollout, mask=mask)), "chunks": []}
    for field, chunk in ((OLD, 7), (OLD, 3), (SCORED, 2), (OLD, 1)):
        given = queue()
        stated = measured(given, Scoring(field=field), chunk, sample=1000)
        assert stated.gap is not None and stated.drift is None
        found["chunks"].append(
            {
                **figures(stated.gap), "lengths": stated.lengths.tolist(), "truncated": stated.truncated.tolist(),
                "drawn": len(gap_sample(stated.gap)["old_logprobs"]), "together": [given.most, chunk],
            }
        )  # fmt: skip
    unscored = measured(queue(), None)
    found["unscored"] = [unscored.gap, unscored.lengths.tolist()]
    found["tokens"] = [int(row.sum()) for number, row in enumerate(mask) if number != FILLED_UP]
    return found


def of_a_sample() -> dict[str, Any]:
    """Measure a batch that is larger than means are taken of, as it is and with a broken row outside of the sample."""
    given = queue()
    keys = batch(given)
    for tag, count in zip(keys.tags, RESPONSES, strict=True):
        tag["response_len"] = count
    before, measure.MEANS_OF = measure.MEANS_OF, 30
    try:
        lengths = torch.tensor([0 if row == FILLED_UP else count for row, count in enumerate(RESPONSES)])
        means = rows_of_means(lengths, STEP, 30)
        fields = (nested(given.rows[name]) for name in (OLD, "rollout_log_probs", "response_mask"))
        old, rollout, mask = (field.values() for field in fields)
        places = torch.tensor(RESPONSES)
        expected = gap_sums(old=old, rollout=rollout, mask=mask, lengths=places, means=means)
        measure.tq, measure.CHUNK = given, 3
        stated = measure.measure(keys, STEP, Scoring(), BadKeys(keys), longest=17).gap
        left = next(row for row in range(len(RESPONSES)) if not means[row] and row != FILLED_UP)
        given.rows[OLD][left] = given.rows[OLD][left] * float("nan")
        bad = BadKeys(keys)
        measure.measure(keys, STEP, Scoring(), bad, longest=17)
    finally:
        measure.MEANS_OF = before
    assert stated is not None
    return {
        "found": gap_metrics(stated), "expected": gap_metrics(expected), "drawn": int(means.sum()),
        "bad": told(bad), "left": given.keys[left],
    }  # fmt: skip


def evidence() -> dict[str, Any]:
    """Return the lines that are kept of a batch, of a corrected one with routes, and of one that nobody has scored."""
    routes, layers = torch.tensor([[[0, 1], [2, 3]]], dtype=torch.uint8), [1, 3]
    scored, corrected, unscored = queue(), queue(), queue()
    scored.rows[OLD][5] = scored.rows[OLD][5] + 3.0
    del unscored.rows[OLD]
    corrected.rows["loss_mask"] = list(corrected.rows["response_mask"])
    corrected.rows["response_mask"] = [mask * 0 for mask in corrected.rows["response_mask"]]
    corrected.rows["routed_experts"] = []
    for prompt, response in zip(corrected.rows["prompts"], corrected.rows["responses"], strict=True):
        ids = [*prompt.tolist(), *response.tolist()]
        recorded = with_digests(routes.repeat(len(ids) - 1, 1, 1), ids)
        corrected.rows["routed_experts"].append(torch.from_numpy(recorded))
    experts = {"layers": layers, "num_experts": 4, "top_k": 2}
    found = {}
    for name, given in {"scored": scored, "corrected": corrected, "unscored": unscored}.items():
        module.tq = given
        keys = batch(given)
        for row, tag in enumerate(keys.tags):
            tag["min_global_steps"] = 2 if row == 1 else 3
        held = StoredBatch(keys, 3, provenance=None, experts=experts, settings=lambda: {"host": "verl"})
        found[name] = lines_of(held, "RecordError: rollout prompt_3_0 of step 4 has no old_log_probs")
    return found


def unfit() -> dict[str, Any]:
    """Say what becomes of values that are no log-probabilities, by the side and the row that they are of."""
    found = {}
    for name, (field, row, token, value) in {
        "sampled": ("rollout_log_probs", 5, 9, float("nan")),
        "infinite": ("rollout_log_probs", 2, 0, float("-inf")),
        "a tool's": ("rollout_log_probs", 1, 6, float("nan")),
        "filled up": ("rollout_log_probs", FILLED_UP, 0, float("nan")),
        "trainer's": (OLD, 6, 11, float("inf")),
    }.items():
        given = queue()
        given.rows[field][row] = given.rows[field][row].clone()
        given.rows[field][row][token] = value
        bad = BadKeys(batch(given))
        stated = measured(given, Scoring(), bad=bad)
        without = queue()
        without.rows["response_mask"][row] = torch.zeros_like(without.rows["response_mask"][row])
        expected = measured(without, Scoring())
        assert stated.gap is not None and expected.gap is not None
        found[name] = told(bad)
        found[f"{name} left out"] = gap_metrics(stated.gap) == gap_metrics(expected.gap)
        found[f"{name} lengths"] = len(stated.lengths)
    given = queue()
    given.rows["rollout_log_probs"][5] = given.rows["rollout_log_probs"][5][:9]
    found["short"] = refused(measured, given, Scoring())
    for name in ("rollout_log_probs", OLD):
        given = queue()
        del given.rows[name]
        found[f"absent {name}"] = refused(measured, given, Scoring())
    given = queue()
    given.rows.pop("ref_log_prob", None)
    measure.tq = given  # type: ignore[assignment]
    keys = batch(given)
    found["absent ref_log_prob"] = refused(
        measure.measure, keys, STEP, Scoring(), BadKeys(keys), longest=17, reference=True
    )
    return found


def as_sampled() -> dict[str, Any]:
    """Hold a batch against what was noted of its requests, as they were and after changes; return what is refused."""
    lengths, prompts = [4, 3, 2], [2, 1, 3]
    tokens = [list(range(row, row + prompt + n)) for row, (prompt, n) in enumerate(zip(prompts, lengths, strict=True))]
    noted: list[dict[str, Any]] = [
        {
            SETTINGS: [{"temperature": 1.0, "top_k": -1}],
            SAMPLED: [[prompt, int(numbers(ids)[prompt - 1]), len(ids), int(numbers(ids)[-1])]],
        }
        for ids, prompt in zip(tokens, prompts, strict=True)
    ]
    found: dict[str, Any] = {}
    expected = SamplingSettings(temperature=1.0, top_k=0)
    for case in ("as it was", "another token", "masked", "nobody knows", "moved"):
        extra = deepcopy(noted)
        masks = [torch.ones(n, dtype=torch.int64) for n in lengths]
        responses = [torch.tensor(ids[prompt:]) for ids, prompt in zip(tokens, prompts, strict=True)]
        if case in ("another token", "masked", "nobody knows"):
            responses[1] = responses[1] + 1
        if case == "masked":
            masks[1].zero_()
        if case == "nobody knows":
            extra[1] = {}
        if case == "moved":
            extra[2][SETTINGS].append({"temperature": 0.7, "top_k": -1})
        rows = {"prompts": [torch.tensor(ids[:prompt]) for ids, prompt in zip(tokens, prompts, strict=True)]}
        given = Queue(rows | {"responses": responses, "response_mask": masks, "extra_fields": extra})
        keys = SimpleNamespace(keys=given.keys, tags=[{} for _ in given.keys], partition_id="train")
        batch_checks.tq, batch_checks.CHUNK = given, 2
        bad = BadKeys(keys)
        metrics: dict[str, float] = {}
        batch_checks.check_tokens(keys, STEP, bad, metrics)
        found[case] = [refused(batch_checks.check_settings, keys, STEP, expected), told(bad)]
        found[f"{case}, metrics"] = {name.rpartition("/")[2]: value for name, value in metrics.items()}
    return found


def by_version() -> dict[str, Any]:
    """Measure rows of several versions."""
    lengths, prompts = [4, 3, 2], [2, 1, 3]
    extra = [
        {"weight_versions": [(6, 2), (7, 4)], "min_global_steps": 6, "max_global_steps": 7},
        {"min_global_steps": 7, "max_global_steps": 7},
        {"weight_versions": [(7, 5)], "min_global_steps": 6, "max_global_steps": 7},  # of its second turn alone
    ]
    given = Queue(
        {
            "rollout_log_probs": [torch.full((n,), -1.0) for n in lengths],
            OLD: [torch.full((n,), -1.0 - 0.5**row) for row, n in enumerate(lengths)],
            "response_mask": [torch.ones(n, dtype=torch.int64) for n in lengths],
            "extra_fields": extra,
        }
    )
    keys = SimpleNamespace(keys=given.keys, tags=[{"prompt_len": n} for n in prompts], partition_id="train")
    first_turn = {"weight_versions": [(6, 2)], "min_global_steps": 6, "max_global_steps": 7}
    # The stamps are of the last turn alone: as a loop hands them on that takes the last answer's `extra_fields`.
    stamped = {"min_global_steps": 7, "max_global_steps": 7}
    turns = {"weight_versions": [(6, 2), (7, 8)], **stamped}
    found: dict[str, Any] = {
        "segments": [segments_of(e, p, n) for e, p, n in zip(extra, prompts, lengths, strict=True)],
        "first_turn": segments_of(first_turn, 2, 4),
        "last_stamps": segments_of(turns, 2, 10),
        "last_segments": segments_of({"weight_versions": [(7, 8)], **stamped}, 2, 10),
        # Each turn an output of its own, of 2 and 3 tokens.
        "outputs": [
            segments_of({**turns, "min_global_steps": 6, "max_global_steps": 6}, 2, 2), segments_of(turns, 8, 3)
        ],
        "of_routes": versions(TensorDict({"extra_fields": NonTensorStack(turns, stamped, {})}, batch_size=3)),
    }  # fmt: skip
    measure.tq, measure.CHUNK = given, 2
    for name, version in (("batch", 7), ("replayed", 7)):
        scoring = Scoring(version=version, replayed=name == "replayed")
        sums = measure.measure(keys, STEP, scoring, BadKeys(keys), longest=9).drift
        assert sums is not None
        found[name] = drift_metrics(sums)
    del given.rows["extra_fields"]
    sums = measure.measure(keys, STEP, Scoring(version=7), BadKeys(keys), longest=9).drift
    assert sums is not None
    found["nobody knows"] = drift_metrics(sums)
    given.rows["extra_fields"] = extra
    found["ahead"] = refused(measure.measure, keys, STEP, Scoring(version=6), BadKeys(keys), longest=9)
    return found


def kl() -> dict[str, Any]:
    """Sum up the KL and put the baseline of a batch, prompt by prompt and all prompts together, with and without a gap."""
    found: dict[str, Any] = {}
    section = KlConfig(coef=1.0)
    names = (OLD, "ref_log_prob", "response_mask")
    for name, chunk, scoring in (("whole", 7, Scoring()), ("one by one", 1, Scoring()), ("bypass", 7, None)):
        given = queue()
        given.keys = [f"prompt{row % 3}_{row}_0" for row in range(len(given.keys))]
        measure.tq, measure.CHUNK = given, chunk
        keys = batch(given)
        stated = measure.measure(keys, STEP, scoring, BadKeys(keys), longest=17, reference=True, kl=section)
        old, ref, mask = (nested(given.rows[field]).to_padded_tensor(0) for field in names)
        expected = kl_sums(logprobs=old, ref_logprobs=ref, mask=mask)
        assert stated.kl is not None and (stated.gap is None) == (scoring is None)
        found[name] = {
            "error": max(float((stated.kl[key] - value).abs().max()) for key, value in expected.items()),
            "baseline": [row.tolist() for row in given.rows[measure.BASELINE]],
            "lengths": stated.lengths.tolist(),
            "fetched": len(given.fetched),
        }
    return found


def discarded() -> list[Any]:
    """Return what is left of a batch after a correction, with and without weights, chunk by chunk."""
    found = []
    for weighted in (False, True):
        given = queue()
        measure.tq, measure.CHUNK = given, 3
        keys = batch(given)
        sampled = measure.measure(keys, STEP, Scoring(), BadKeys(keys), longest=17).tokens
        given.rows["response_mask"][1] = torch.zeros_like(given.rows["response_mask"][1])
        if weighted:
            given.rows["rollout_is_weights"] = [torch.ones(len(row)) for row in given.rows["response_mask"]]
            given.rows["rollout_is_weights"][0][:3] = 0.0
        found.append([measure.left_by_correction(keys).tolist(), sampled.tolist()])
        assert given.most == 3
    return found


def grouping() -> dict[str, Any]:
    """Group a batch's rows, some prompts with more answers than are fetched at a time, and one session of several outputs."""
    measure.CHUNK = 64
    answers = [3, 80, 1, 40, 30, 2, 64]
    keys = [f"prompt{prompt}_{answer}_0" for prompt, count in enumerate(answers) for answer in range(count)]
    keys += ["turns_0_0", "turns_0_1", "turns_1_0", "prompt0_3_0"]
    found = measure.groups(keys)
    return {"keys": keys, "groups": found, "chunks": list(measure.chunks(found))}


def users_own_metrics(names: list[str]) -> list[str]:
    """Record a step that has a user's own metrics, and return the names that verl's loggers get."""
    from mismatch_ext.adapters.verl.driver.trainer import (
        MismatchTrainer,  # in a fork, as `scenarios_driver.driving` says
    )

    driver: Any = object.__new__(MismatchTrainer)
    driver._weights, driver._saved_step, driver.global_steps = None, 0, STEP
    metrics = dict.fromkeys(names, 0.5)
    with tempfile.TemporaryDirectory() as folder:
        header = {"run": {"name": "a run", "host": "verl"}}
        driver._log = RunLog(MismatchConfig(), Path(folder), info=lambda: header, step=lambda: STEP)
        driver._log.begin(None)
        driver._record(metrics, STEP)
    return sorted(metrics)


def masks_fetched() -> dict[str, Any]:
    """Check the sampling masks of more rows than are fetched together, of which one has none."""
    from mismatch_ext.adapters.verl import sampling_mask

    rows = 2 * sampling_mask.CHUNK + 3
    given = Queue({"response_mask": [torch.ones(1)] * rows, "extra_fields": [{} for _ in range(rows)]})
    given.rows["extra_fields"][-1] = {sampling_mask.UNKNOWN: "it was lost."}
    sampling_mask.tq = given
    keys = SimpleNamespace(keys=given.keys, tags=[{}] * rows, partition_id="train")
    bad = BadKeys(keys)
    sampling_mask.check_masks(keys, STEP, bad)
    return {
        "most": given.most,
        "chunk": sampling_mask.CHUNK,
        "bad": {keys.keys[row]: bad.rows.faults[row].message for row in bad.rows.faults},
    }
