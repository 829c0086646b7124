"""What verl's driver measures of a batch, in chunks of rows, without Ray: the queue is a dictionary of rows."""

from __future__ import annotations

import math
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


def chunks() -> None:
    """Compare what is measured chunk by chunk, of either field of scores, with what is measured of the whole, padded."""
    rows = queue().rows
    mask = nested(rows["response_mask"]).to_padded_tensor(0).bool()
    rollout, old = (nested(rows[name]).to_padded_tensor(0.0) for name in ("rollout_log_probs", OLD))
    whole = figures(gap_sums(old=old, rollout=rollout, mask=mask))
    tokens = [int(row.sum()) for number, row in enumerate(mask) if number != FILLED_UP]
    assert whole["scalars"]["tokens"] == sum(tokens) and whole["scalars"]["k3_kl"] > 1e-6
    for field, chunk in ((OLD, 7), (OLD, 3), (SCORED, 2), (OLD, 1)):
        given = queue()
        stated = measured(given, Scoring(field=field), chunk, sample=1000)
        assert stated.drift is None and same(figures(stated.gap), whole)
        assert stated.lengths.tolist() == tokens
        # Tokens of a tool fill a response up, too: the second has 17 places, of which 13 are the policy's.
        assert stated.truncated.tolist() == [False, True, False, False, True, False]
        assert len(gap_sample(stated.gap)["old_logprobs"]) == sum(tokens) and given.most == chunk
    unscored = measured(queue(), None)
    assert unscored.gap is None and unscored.lengths.tolist() == tokens


def same(found: Any, expected: Any) -> bool:
    """Tell whether nested numbers are the same but for the order of sums in float64."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[name], value) for name, value in expected.items())
    if isinstance(expected, list):
        return len(found) == len(expected) and all(same(*pair) for pair in zip(found, expected, strict=True))
    return found == expected or math.isclose(found, expected, rel_tol=1e-12, abs_tol=1e-15)


def of_a_sample() -> None:
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
    metrics = gap_metrics(stated)
    assert same(metrics, gap_metrics(expected)) and "k3_kl_error" in metrics
    assert int(means.sum()) < 6 and metrics["mean_tokens"] < metrics["tokens"]
    ((reason, message),) = told(bad)
    assert reason == "old_logprobs" and message.startswith(f"rollout {given.keys[left]} of step 4, token 0")


def evidence() -> None:
    """Check the lines that are kept of a batch, of a corrected one with routes, and of one that nobody has scored."""
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
        found[name] = lines = lines_of(held, "RecordError: rollout prompt_3_0 of step 4 has no old_log_probs")
        # Without the row that verl has filled the batch up with; the row that the message names comes first.
        assert sorted(line["kept"]["row"] for line in lines) == list(range(6)) and lines[0]["kept"]["row"] == 3
    first, second = found["scored"][:2]
    assert second["kept"]["row"] == 4 and len(second["trainer_logprobs"]) == 30  # the row with the largest gap
    assert first["prompt_ids"] == [1, 2, 3, 4, 5, 6] and first["response_ids"] == [20, 21, 22]
    assert not any("trainer_logprobs" in line for line in found["unscored"])
    # What verl's correction rejects still counts as sampled.
    masks = ({line["kept"]["row"]: line["response_mask"] for line in found[name]} for name in ("scored", "corrected"))
    first, second = masks
    assert first == second and any(first[0])
    for line in found["corrected"]:
        assert line["routes"]["shape"][0] == len(line["prompt_ids"]) + len(line["response_ids"]) - 1


def unfit() -> None:
    """Check what becomes of values that are no log-probabilities, by the side and the row that they are of."""
    for field, row, token, value, reason in (
        ("rollout_log_probs", 5, 9, float("nan"), "rollout_logprobs"),
        (OLD, 6, 11, float("inf"), "old_logprobs"),
        ("rollout_log_probs", 1, 6, float("nan"), None),  # a tool's
        ("rollout_log_probs", FILLED_UP, 0, float("nan"), None),
    ):
        given, without = queue(), queue()
        given.rows[field][row] = given.rows[field][row].clone()
        given.rows[field][row][token] = value
        bad = BadKeys(batch(given))
        stated = measured(given, Scoring(), bad=bad)
        if reason is None:
            assert told(bad) == [] and len(stated.lengths) == 6
            continue
        ((found, message),) = told(bad)
        assert found == reason and message.startswith(f"rollout prompt_{row}_0 of step 4, token {token}: the ")
        assert len(stated.lengths) == 5
        without.rows["response_mask"][row] = torch.zeros_like(without.rows["response_mask"][row])
        assert gap_metrics(stated.gap) == gap_metrics(measured(without, Scoring()).gap)  # type: ignore[arg-type]
    given = queue()
    given.rows["rollout_log_probs"][5] = given.rows["rollout_log_probs"][5][:9]
    assert "rollout prompt_5_0 of step 4 has 9 rollout_log_probs and 30 places" in refused(measured, given, Scoring())
    for name, advice in (("rollout_log_probs", "calculate_log_probs=True"), (OLD, "worker of your actor")):
        given = queue()
        del given.rows[name]
        assert advice in refused(measured, given, Scoring())


def as_sampled() -> None:
    """Hold a batch against what was noted of its requests, as they were and after changes."""
    lengths, prompts = [4, 3, 2], [2, 1, 3]
    tokens = [list(range(row, row + prompt + n)) for row, (prompt, n) in enumerate(zip(prompts, lengths, strict=True))]
    noted: list[dict[str, Any]] = [
        {
            SETTINGS: [{"temperature": 1.0, "top_k": -1}],
            SAMPLED: [[prompt, int(numbers(ids)[prompt - 1]), len(ids), int(numbers(ids)[-1])]],
        }
        for ids, prompt in zip(tokens, prompts, strict=True)
    ]
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
        said = refused(batch_checks.check_settings, keys, STEP, expected)
        if case == "moved":
            assert said.startswith("RecordError: rollout prompt_2_0 of step 4 was sampled with temperature=0.7, and")
        else:
            assert said == "nothing was refused", case
        if case == "another token":
            ((reason, message),) = told(bad)
            assert reason == "tokens" and message.startswith("rollout prompt_1_0 of step 4, token 0: the tokens to be")
            # Three of nine tokens are not those that the request sampled; a row that nobody noted is not counted.
            assert sorted(metrics.values()) == [1 / 3, 3 / 9]
        else:
            assert told(bad) == [] and not any(metrics.values()), case


def by_version() -> None:
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
    # The stamps are of the last turn alone: as a loop hands them on that takes the last answer's `extra_fields`.
    stamped = {"min_global_steps": 7, "max_global_steps": 7}
    turns = {"weight_versions": [(6, 2), (7, 8)], **stamped}
    found = [segments_of(e, p, n) for e, p, n in zip(extra, prompts, lengths, strict=True)]
    # Segments that begin behind another prompt are of a later turn, and say nothing of what is before it.
    assert found == [[(6, 0), (7, 2)], [(7, 0)], [(None, 0)]]
    # A stamp that contradicts what the client noted proves nothing of the tokens of older turns.
    assert segments_of(turns, 2, 10) == [(None, 0)]
    of_routes = versions(TensorDict({"extra_fields": NonTensorStack(turns, stamped, {})}, batch_size=3))
    assert of_routes == [(6, 7), (7, 7), None]
    measure.tq, measure.CHUNK = given, 2

    def drift(**scoring: Any) -> dict[str, float]:
        sums = measure.measure(keys, STEP, Scoring(version=7, **scoring), BadKeys(keys), longest=9).drift
        assert sums is not None
        return drift_metrics(sums)

    of_batch = drift()
    assert of_batch["numerics/tokens"] == 5 and of_batch["staleness_max"] == 1
    assert math.isclose(of_batch["numerics/logp_abs_diff_mean"], (2 * 1.0 + 3 * 0.5) / 5)
    assert math.isclose(of_batch["unknown_version_frac"], 2 / 9)
    # The first response's end is of this version, and what is before it was routed by older weights.
    replayed = drift(replayed=True)
    assert replayed["numerics/tokens"] == 3 and math.isclose(replayed["numerics/logp_abs_diff_mean"], 0.5)
    assert math.isclose(replayed["mixed_routes_frac"], 2 / 9)
    ahead = refused(measure.measure, keys, STEP, Scoring(version=6), BadKeys(keys), longest=9)
    assert ahead.startswith("RecordError: a token was sampled by weights of version 7, and the batch is scored")
    # An agent loop that hands on no extra_fields says nothing of versions.
    del given.rows["extra_fields"]
    assert drift()["unknown_version_frac"] == 1


def kl() -> None:
    """Sum up the KL and put the baseline of a batch, prompt by prompt and all prompts together, with and without a gap."""
    baselines = []
    for chunk, scoring in ((7, Scoring()), (1, Scoring()), (7, None)):
        given = queue()
        given.keys = [f"prompt{row % 3}_{row}_0" for row in range(len(given.keys))]
        measure.tq, measure.CHUNK = given, chunk
        keys = batch(given)
        section = KlConfig(coef=1.0)
        stated = measure.measure(keys, STEP, scoring, BadKeys(keys), longest=17, reference=True, kl=section)
        names = (OLD, "ref_log_prob", "response_mask")
        old, ref, mask = (nested(given.rows[field]).to_padded_tensor(0) for field in names)
        assert stated.kl is not None and (stated.gap is None) == (scoring is None)
        for key, value in kl_sums(logprobs=old, ref_logprobs=ref, mask=mask).items():
            torch.testing.assert_close(stated.kl[key], value, rtol=0, atol=1e-9)
        baselines.append(nested(given.rows[measure.BASELINE]).to_padded_tensor(0.0))
    assert baselines[0].any()
    for baseline in baselines[1:]:
        torch.testing.assert_close(baseline, baselines[0], rtol=1e-6, atol=1e-9)


def discarded() -> None:
    """Check what is left of a batch after a correction, with and without weights, chunk by chunk."""
    for weighted in (False, True):
        given = queue()
        measure.tq, measure.CHUNK = given, 3
        keys = batch(given)
        expected = measure.measure(keys, STEP, Scoring(), BadKeys(keys), longest=17).tokens.tolist()
        assert expected[FILLED_UP] == 0 and expected.count(0) == 1
        given.rows["response_mask"][1] = torch.zeros_like(given.rows["response_mask"][1])
        expected[1] = 0
        if weighted:
            given.rows["rollout_is_weights"] = [torch.ones(len(row)) for row in given.rows["response_mask"]]
            given.rows["rollout_is_weights"][0][:3] = 0.0
            expected[0] -= 3
        assert measure.left_by_correction(keys).tolist() == expected and given.most == 3


def grouping() -> None:
    """Group a batch's rows, some prompts with more answers than are fetched at a time, and one session of several outputs."""
    measure.CHUNK = 64
    answers = [3, 80, 1, 40, 30, 2, 64]
    keys = [f"prompt{prompt}_{answer}_0" for prompt, count in enumerate(answers) for answer in range(count)]
    keys += ["turns_0_0", "turns_0_1", "turns_1_0", "prompt0_3_0"]
    found = measure.groups(keys)
    assert sorted(key for group in found for key in group) == sorted(keys)
    # Four answers to the first prompt, of which one came late; a session of several outputs is in no group.
    assert len(found[0]) == 4 and ["turns_0_0"] in found and ["turns_0_1"] in found
    cut = list(measure.chunks(found))
    assert [group for chunk in cut for group in chunk] == found
    assert all(len(chunk) == 1 or sum(map(len, chunk)) <= 64 for chunk in cut)


def users_own_metrics() -> None:
    """Check that verl's loggers keep a user's metric with our prefix in its name."""
    from mismatch_ext.adapters.verl.driver.trainer import (
        MismatchTrainer,  # in a fork, as `scenarios_driver.driving` says
    )

    driver: Any = object.__new__(MismatchTrainer)
    driver._weights, driver._saved_step, driver.global_steps = None, 0, STEP
    users = ["reward/mismatch/format", "val-core/token_mismatch/acc/mean@8"]
    ours = ["mismatch/k3_kl", "mismatch/seq_kl", "mismatch/routing/layer_3_set_mismatch"]
    metrics = dict.fromkeys([*users, *ours], 0.5)
    with tempfile.TemporaryDirectory() as folder:
        header = {"run": {"name": "a run", "host": "verl"}}
        driver._log = RunLog(MismatchConfig(), Path(folder), info=lambda: header, step=lambda: STEP)
        driver._log.begin(None)
        driver._record(metrics, STEP)
    assert metrics.keys() == {*users, "mismatch/k3_kl", "mismatch/alarms_raised"}
