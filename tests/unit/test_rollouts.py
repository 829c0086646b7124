"""Logged rollouts come back as their hosts wrote them, and what cannot be used is named by its place in the file."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_ext.doctor import read_rollouts, write_rollouts
from mismatch_ext.doctor.logged import Logged, of_nearest
from mismatch_ext.errors import MismatchError, RecordError, RoutingError, RunDirectoryError
from mismatch_ext.rollout import Provenance, RolloutRecord, SamplingSettings
from mismatch_ext.routing import RoutingShape, RoutingTrace
from tests.traces import same

FILES = Path(__file__).parents[1] / "data/rollouts"
SHAPE = RoutingShape(num_layers=4, layers=(0, 1, 2, 3), num_experts=16, top_k=4)


def provenance(version: int = 0, **sampling: Any) -> Provenance:
    return Provenance(
        engine="vllm", engine_version="0.30.0", dtype="bfloat16", kv_cache_dtype="bfloat16", weight_version=version,
        patch_digest="none", sampling=SamplingSettings(**sampling), logprobs_mode="processed_logprobs",
    )  # fmt: skip


def record(logprobs: tuple[float, ...], mask: tuple[bool, ...], **fields: Any) -> RolloutRecord:
    made: dict[str, Any] = {"provenance": provenance(), "finish_reason": "stop"}
    return RolloutRecord(
        prompt_ids=(5, 12), response_ids=tuple(range(3, 3 + len(mask))), rollout_logprobs=logprobs, response_mask=mask,
        **made | fields,
    )  # fmt: skip


def written(folder: Path, *records: RolloutRecord, **how: Any) -> Path:
    write_rollouts(records, folder / "rollouts.jsonl", **how)
    return folder / "rollouts.jsonl"


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    # A masked token keeps the log-probability that the engine gave.
    records = [record((-0.7, -2.3), (False, True)), record((-1.0, float("nan"), -0.5), (True, False, True))]
    found = read_rollouts(written(tmp_path, *records)).sample()
    assert found.prompts == ((5, 12), (5, 12)) and found.responses == ((3, 4), (3, 4, 5))
    assert found.masks == ((False, True), (True, False, True)) and found.logprobs[0] == (-0.7, -2.3)
    assert np.array_equal(found.engine, [-2.3, -1.0, -0.5]) and found.row.tolist() == [0, 1, 1]


@pytest.mark.parametrize("num_experts", [16, 300])
def test_routes_and_what_is_known_of_the_engine_come_back(tmp_path: Path, num_experts: int) -> None:
    ids = torch.arange(3 * 2 * 4).reshape(3, 2, 4) % num_experts
    ids[0, 0, 0] = num_experts - 1
    shape = RoutingShape(num_layers=6, layers=(1, 4), num_experts=num_experts, top_k=4)
    tokens = (5, 12, 3, 4)
    trace = RoutingTrace.ingest(ids, num_experts=num_experts, layers=(1, 4), tokens=tokens, version=0, request="0")
    made = record((-0.1, -2.3), (True, True), routing=trace, provenance=provenance(3, temperature=0.7))
    found = read_rollouts(written(tmp_path, made, made))
    routes = found.sample(shape).routes
    assert routes is not None and all(same(route, trace) for route in routes)
    assert found.settings["temperature"] == 0.7 and found.settings["dtype"] == "bfloat16"
    assert read_rollouts(written(tmp_path, made, made, routes=False)).sample(shape).routes is None


def rows(logged: Logged, shape: RoutingShape | None = SHAPE) -> list[tuple[Any, ...]]:
    """Return what is compared of each response."""
    found = logged.sample(shape)
    routes = found.routes or [None] * len(found.responses)
    return [
        (prompt, response, mask, logprobs, None if trace is None else trace.experts.tolist())
        for prompt, response, mask, logprobs, trace in zip(
            found.prompts, found.responses, found.masks, found.logprobs, routes, strict=True
        )
    ]


def test_slimes_own_file_holds_what_was_sampled() -> None:
    found = read_rollouts(FILES / "slime_0.pt")
    assert rows(found) == rows(read_rollouts(FILES / "own.jsonl"))
    assert found.host == "slime" and found.left_out == 1 and {row.versions for row in found.responses} == {("3",)}


def test_nemo_rls_own_file_holds_what_was_sampled() -> None:
    found = read_rollouts(FILES / "nemo_rl_train_data_step1.jsonl")
    own = rows(read_rollouts(FILES / "own.jsonl"))
    assert found.host == "NeMo-RL" and rows(found) == [(*row[:4], None) for row in own]


def test_prime_rls_own_file_holds_what_was_sampled_once() -> None:
    found = read_rollouts(FILES / "prime_rl_traces.jsonl")
    own = [row[:4] for row in rows(read_rollouts(FILES / "own.jsonl"))]
    first, second, *others = [row[:4] for row in rows(found)]
    # The answer is trained on in the first of its branches, and is context in the second.
    prompt, answer, mask, logprobs = own[0]
    assert first[:3] == (prompt, (*answer, 5, 6, 7, 1), (*mask, False, False, True, True))
    assert first[3][: len(answer)] == logprobs and first[3][-2:] == (-0.5, -0.25)
    assert second == ((*prompt, *answer, 8), (9,), (True,), (-0.125,))
    assert others == own[1:] and found.left_out == 1, "the judge's tokens are of another model"


GOOD: dict[str, Any] = {"prompt_ids": [1], "response_ids": [2, 3], "rollout_logprobs": [-1.0, -2.0]}
REFUSED = [json.loads(line) for line in (FILES / "refused.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case["words"])
def test_a_line_that_cannot_be_used_is_named(case: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps(case['row'])}\n", encoding="utf-8")
    with pytest.raises(MismatchError, match=re.escape(case["words"])):
        read_rollouts(path).sample()


def test_the_version_nearest_to_the_trainer_is_examined(tmp_path: Path) -> None:
    logged = read_rollouts(written(tmp_path, *[record((-0.1,), (True,), provenance=provenance(v)) for v in (3, 4, 4)]))
    found, notes = of_nearest(logged, logged.sample(), np.array([-0.4, -0.11, -0.13]))
    assert logged.versions == {"3": 1, "4": 2} and [response.version for response in found.responses] == ["4", "4"]
    assert notes[0].startswith("weight version 3: 1 responses, 1 tokens, mean |Δlogp| 3.0e-01 nats, k3 4.1e-02")


def test_one_weight_version_can_be_chosen(tmp_path: Path) -> None:
    path = written(tmp_path, *[record((-0.1,), (True,), provenance=provenance(v)) for v in (3, 4, 4)])
    found = read_rollouts(path, "4")
    assert len(found.responses) == 2 and found.left_out == 1
    with pytest.raises(RecordError, match=r"no response of weight version 5; it has 3 \(1 responses\), 4 \(2"):
        read_rollouts(path, "5")


PLAIN = {"prompt_ids": [5, 12], "response_ids": [3], "rollout_logprobs": [-0.1]}


def plain(folder: Path, *rows: dict[str, Any]) -> Path:
    """Write the lines that a loop without this package would write."""
    path = folder / "plain.jsonl"
    path.write_text("".join(json.dumps(PLAIN | row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_plain_line_gives_its_version_and_says_what_is_not_read(tmp_path: Path) -> None:
    found = read_rollouts(plain(tmp_path, *[{"weight_version": v, "reward": 1.0} for v in (3, 4, 4)]))
    assert found.versions == {"3": 1, "4": 2} and found.said(False).endswith(
        "keys of the rows that were not used: reward"
    )
    with pytest.raises(RecordError, match="line 1: weight_version is 4, and provenance.weight_version 3"):
        read_rollouts(plain(tmp_path, {"weight_version": 4, "provenance": {"weight_version": 3}}))
    assert read_rollouts(plain(tmp_path, {"step": 1}, {"step": 2})).versions == {"1": 1, "2": 1}, "as good as versions"


@pytest.mark.parametrize(("steps", "words"), [((1, 2, 2), "steps: 82%"), ((2, 2, 2), "staleness: 82%")])
def test_several_versions_are_stale_only_if_one_step_trained_on_them(
    steps: tuple[int, ...], words: str, tmp_path: Path
) -> None:
    rows = [{"weight_version": v, "step": step} for v, step in zip((3, 4, 4), steps, strict=True)]
    logged = read_rollouts(plain(tmp_path, *rows))
    assert of_nearest(logged, logged.sample(), np.array([-0.4, -0.11, -0.13]))[1][2].startswith(words)


def test_the_trainers_own_scores_in_a_log_are_those_of_the_sampled_tokens(tmp_path: Path) -> None:
    two = {"response_ids": [3, 4], "rollout_logprobs": [-0.1, None], "response_mask": [True, False]}
    some = read_rollouts(plain(tmp_path, two, two | {"trainer_logprobs": [-0.3, -0.1]}))
    np.testing.assert_array_equal(some.trainer(some.sample()), [np.nan, -0.3])
    bare = read_rollouts(plain(tmp_path, two, two))
    assert bare.trainer(bare.sample()) is None


def test_responses_that_were_sampled_otherwise_are_named(tmp_path: Path) -> None:
    path = written(tmp_path, *[record((-0.1,), (True,), provenance=provenance(temperature=t)) for t in (1.0, 0.7)])
    with pytest.raises(RecordError, match=r"line 2 was sampled with temperature=0.7, and .*line 1 with 1.0"):
        _ = read_rollouts(path).settings


def test_routes_of_another_model_are_named() -> None:
    found = read_rollouts(FILES / "own.jsonl")
    with pytest.raises(RoutingError, match="line 1: its routes are of experts per layer 16, the model has 8"):
        found.sample(RoutingShape(num_layers=4, layers=(0, 1, 2, 3), num_experts=8, top_k=4))
    with pytest.raises(RoutingError, match="holds routes, and the model has no experts"):
        found.sample()


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_what_could_run_code_is_not_unpickled(tmp_path: Path) -> None:
    sample = {"tokens": [1, 2], "response_length": 1, "rollout_log_probs": [-1.0], "metadata": Trap(tmp_path / "ran")}
    torch.save({"rollout_id": 0, "samples": [sample, sample]}, tmp_path / "0.pt")
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps([sample]))
    for name, words in (
        ("0.pt", "holds objects that are not unpickled"),
        ("plain.pkl", "is neither text nor a file of"),
    ):
        with pytest.raises(RecordError, match=words):
            read_rollouts(tmp_path / name)
    assert not (tmp_path / "ran").exists()


def test_a_reward_of_numpys_is_no_hindrance(tmp_path: Path) -> None:
    sample = {"tokens": [1, 2], "response_length": 1, "rollout_log_probs": [-1.0], "reward": np.float32(1)}
    torch.save({"rollout_id": 0, "samples": [sample] * 2}, tmp_path / "1.pt")
    assert len(read_rollouts(tmp_path / "1.pt").responses) == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rollout_log_probs": None}, "sample 1 has no rollout_log_probs"),
        ({"rollout_log_probs": [-1.0, -1.0]}, "sample 1: 2 logprobs for 1 response_ids"),
        ({"response_length": 2}, "sample 1: its first token counts as sampled"),
    ],
)
def test_a_sample_of_slimes_that_cannot_be_used_is_named(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    sample = {"tokens": [1, 2], "response_length": 1, "rollout_log_probs": [-1.0]}
    torch.save({"rollout_id": 0, "samples": [sample, sample | fields]}, tmp_path / "0.pt")
    with pytest.raises(MismatchError, match=words):
        read_rollouts(tmp_path / "0.pt").sample()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"PAR1\x15\x04\x90PAR1", "is parquet, as TRL's log_completions writes it"),
        ((FILES / "slime_0.pt").read_bytes()[:4000], "is a damaged file of torch.save"),
        ((FILES / "own.jsonl").read_bytes()[:-40], "line 4 is no JSON"),
        (b"\n\n", "is empty"),
        (b"\xdc\x00\x02", "is neither text nor a file of torch.save"),
    ],
    ids=["parquet", "cut archive", "cut line", "empty", "bytes"],
)
def test_a_file_that_is_damaged_is_named(data: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(data)
    with pytest.raises(RecordError, match=words):
        read_rollouts(tmp_path / "log")
    with pytest.raises(RunDirectoryError, match="none.jsonl cannot be read"):
        read_rollouts(tmp_path / "none.jsonl")


def test_a_line_ends_where_json_lines_end_not_at_other_separators_of_unicode(tmp_path: Path) -> None:
    line = json.dumps(GOOD | {"output": "a\u2028b\u0085c"}, ensure_ascii=False)
    (tmp_path / "own.jsonl").write_text(f"{line}\r\n" * 2, encoding="utf-8", newline="")
    assert len(read_rollouts(tmp_path / "own.jsonl").responses) == 2


@pytest.mark.parametrize(
    ("keys", "late"),
    [
        ([{"step": 3}, {"step": 4}], False),
        ([{"weight_version": 3, "step": 3}, {"weight_version": 4, "step": 4}], False),
        ([{"weight_version": 3, "step": 4}, {"weight_version": 4, "step": 4}], True),
        ([{"weight_version": 3}, {"weight_version": 4}], True),
    ],
)
def test_steps_and_versions_tell_whether_the_trainer_scored_with_later_weights(
    keys: list[dict[str, int]], late: bool, tmp_path: Path
) -> None:
    assert read_rollouts(plain(tmp_path, *keys)).scored_late is late


@pytest.mark.parametrize("value", ["0.8", True, -1, float("nan")])
def test_a_temperature_that_no_engine_can_sample_at_is_refused(value: Any, tmp_path: Path) -> None:
    log = plain(tmp_path, {"provenance": {"sampling": {"temperature": value}}})
    with pytest.raises(RecordError, match=f"line 1: the sampling temperature is {value!r}; it must be a number > 0"):
        read_rollouts(log)
