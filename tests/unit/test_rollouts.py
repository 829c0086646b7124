"""Logged rollouts come back as their hosts wrote them, and what cannot be used is named by its place in the file."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_ext.doctor import log_formats, read_rollouts, write_rollouts
from mismatch_ext.doctor.logged import Logged, of_nearest
from mismatch_ext.errors import MismatchError, RecordError, RoutingError, RunDirectoryError
from mismatch_ext.rollout import Provenance, RolloutRecord, SamplingSettings
from mismatch_ext.routing import RoutingShape, RoutingTrace

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
    records = [record((-0.1, -2.3), (True, True)), record((-1.0, float("nan"), -0.5), (True, False, True))]
    found = read_rollouts(written(tmp_path, *records)).sample()
    assert found.prompts == ((5, 12), (5, 12)) and found.responses == ((3, 4), (3, 4, 5))
    assert found.masks == ((True, True), (True, False, True)) and found.routes is None
    assert np.array_equal(found.engine, [-0.1, -2.3, -1.0, -0.5]) and found.row.tolist() == [0, 0, 1, 1]


def test_a_masked_token_keeps_the_log_probability_that_the_engine_gave(tmp_path: Path) -> None:
    late = record((-0.7, -2.3), (False, True))
    assert read_rollouts(written(tmp_path, late, late)).sample().logprobs == ((-0.7, -2.3),) * 2


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
    assert routes is not None and all(route.same_as(trace) for route in routes)
    assert found.settings["temperature"] == 0.7 and found.settings["dtype"] == "bfloat16"
    assert "weight version 3" in found.said(True) and "no routes" not in found.said(True)
    without = read_rollouts(written(tmp_path, made, made, routes=False))
    assert without.sample(shape).routes is None and "no routes in the file" in without.said(True)


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
    assert first[:2] == (prompt, (*answer, 5, 6, 7, 1)) and first[2] == (*mask, False, False, True, True)
    assert first[3][: len(answer)] == logprobs and first[3][-2:] == (-0.5, -0.25)
    assert second == ((*prompt, *answer, 8), (9,), (True,), (-0.125,))
    assert others == own[1:] and found.left_out == 1, "the judge's tokens are of another model"
    assert found.settings == {"temperature": 1.0} and found.responses[0].version == "2"


GOOD: dict[str, Any] = {"prompt_ids": [1], "response_ids": [2, 3], "rollout_logprobs": [-1.0, -2.0]}
ROUTES = {"start": 0, "layers": [0], "num_experts": 2, "dtype": "uint8", "shape": [2, 1, 1]}
NEMO: dict[str, Any] = json.loads((FILES / "nemo_rl_train_data_step1.jsonl").read_text("utf-8").splitlines()[0])
PRIME: dict[str, Any] = json.loads((FILES / "prime_rl_traces.jsonl").read_text("utf-8").splitlines()[3])


def changed(node: int, **fields: Any) -> dict[str, Any]:
    """Return an episode of prime-rl's with other fields of a node."""
    (trace,) = PRIME["traces"]
    nodes = [one | fields if at == node else one for at, one in enumerate(trace["nodes"])]
    return PRIME | {"traces": [trace | {"nodes": nodes}]}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"input": "1+1=", "output": "2", "score": 1.0, "step": 1}, "rollout_data_dir or validation_data_dir, which holds"),
        ({"prompt_ids": [1], "response_ids": [2]}, "line 2 has no rollout_logprobs"),
        (GOOD | {"rollout_logprobs": [-1.0]}, "line 2: 1 logprobs for 2 response_ids"),
        (GOOD | {"rollout_logprobs": [-1.0, None]}, "response 1, token 1: the engine's log-probability is nan"),
        (GOOD | {"rollout_logprobs": [-1.0, "x"]}, "line 2: rollout_logprobs.1: Input should be a valid number, found x"),
        (GOOD | {"response_ids": [2, -3]}, "line 2: response_ids.1: Input should be greater than or equal to 0, found -3"),
        (GOOD | {"response_mask": [1, 2]}, "line 2: response_mask.1: Input should be a valid boolean"),
        (GOOD | {"prompt_ids": []}, "line 2: prompt_ids: List should have at least 1 item"),
        (GOOD | {"provenance": {"weight_version": 1.5}}, "line 2: provenance.weight_version"),
        (GOOD | {"routes": {}}, "line 2: routes.start: Field required, found {}"),
        (GOOD | {"routes": ROUTES | {"experts": "AA=="}}, "line 2: routes cannot be read: ValueError"),
        (GOOD | {"provenance": {"sampling": {"top_p": 0.9}}, "x": 1}, ""),
        ([1], "line 2 is a list"),
        ({"text": "1+1="}, "line 2 holds text, which no format that is known here has"),
        ({"samples": []}, "line 2 holds samples, which no format that is known here has"),
        ({"text": "1+1="}, "A line of our own has the keys prompt_ids, response_ids and rollout_logprobs"),
        (NEMO | {"generation_logprobs": None}, "line 2 has no generation_logprobs"),
        (NEMO | {"token_ids": [[1], [2]]}, "line 2: token_ids must be a list with one entry, found [[1], [2]]"),
        (NEMO | {"input_lengths": [12.0]}, "line 2: input_lengths: Input should be a valid integer, found 12.0"),
        (NEMO | {"token_loss_mask": [[1] * 21]}, "line 2: its first token counts as sampled"),
        (NEMO | {"prev_logprobs": [[]]}, "line 2: 0 prev_logprobs for 13 tokens; the two must be equal"),
        (NEMO | {"token_loss_mask": [[]]}, "line 2: 0 token_loss_mask for 13 tokens; the two must be equal"),
        (PRIME | {"traces": [{}]}, "line 2: traces.0.nodes: Field required, found {}"),
        (changed(1, logprobs=[]), "line 2, trace 0, node 1: 9 token_ids, 9 values of mask and 0 logprobs"),
        (changed(0, mask=[True]), "line 2, trace 0, node 0: 10 token_ids, 1 values of mask and 0 logprobs"),
        (changed(1, parent=1), "line 2, trace 0, node 1: parent 1 must be the number of a node before it"),
        (changed(0, mask=[False]), "line 2, trace 0, node 0: 10 token_ids, 1 values of mask and 0 logprobs"),
    ],
)  # fmt: skip
def test_a_line_that_cannot_be_used_is_named(row: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps(row)}\n", encoding="utf-8")
    if not words:
        assert len(read_rollouts(path).sample().responses) == 2
        return
    with pytest.raises(MismatchError) as raised:
        read_rollouts(path).sample()
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_the_version_nearest_to_the_trainer_is_examined_and_the_rest_is_staleness(tmp_path: Path) -> None:
    path = written(tmp_path, *[record((-0.1,), (True,), provenance=provenance(v)) for v in (3, 4, 4)])
    logged = read_rollouts(path)
    found, notes = of_nearest(logged, logged.sample(), np.array([-0.4, -0.11, -0.13]))
    assert logged.versions == {"3": 1, "4": 2} and [response.version for response in found.responses] == ["4", "4"]
    assert notes[0].startswith("weight version 3: 1 responses, 1 tokens, mean |Δlogp| 3.0e-01 nats, k3 4.1e-02")
    assert notes[1].endswith("mean |Δlogp| 2.0e-02 nats, k3 2.5e-04, the one that was examined")
    assert notes[2].startswith("staleness: 82% of the whole log's 1.1e-01 nats per token is beyond what version 4 has.")
    assert "If each step of the run has one version" in notes[2], "the log does not say which step trained on a row"
    both = replace(logged.responses[0], versions=("3", "4"))
    assert replace(logged, responses=(both, *logged.responses[1:])).versions == {"3+4": 1, "4": 2}


def test_one_weight_version_can_be_chosen(tmp_path: Path) -> None:
    path = written(tmp_path, *[record((-0.1,), (True,), provenance=provenance(v)) for v in (3, 4, 4)])
    found = read_rollouts(path, "4")
    assert len(found.responses) == 2 and found.left_out == 1
    with pytest.raises(RecordError, match=r"no response of weight version 5; it has 3 \(1 responses\), 4 \(2"):
        read_rollouts(path, "5")


def test_a_new_format_is_one_entry_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {
        "ids": [5, 12, 3, 4],
        "answer_tokens": 2,
        "sampled": [1, 0],
        "nll_free": [-0.5, 0.0],
        "trainer": [-0.25, -4.0],
        "policy": 7,
        "update": 8,
        "sampling_params": {"temperature": 0.5},
        "experts": np.ones((3, 4, 4), int).tolist(),
    }
    path = tmp_path / "new.jsonl"
    path.write_text(f"{json.dumps(row)}\n" * 2)
    with pytest.raises(RecordError, match="line 1 holds answer_tokens, experts, ids"):
        read_rollouts(path)
    new = log_formats.Format(
        name="a new trainer",
        files="a new trainer's dump",
        recognized_by=("ids", "nll_free"),
        tokens="ids",
        response_length="answer_tokens",
        mask="sampled",
        logprobs="nll_free",
        trainer_logprobs="trainer",
        versions="policy",
        step="update",
        settings="sampling_params",
        routes="experts",
        hint="Set log_ids.",
    )
    monkeypatch.setattr(log_formats, "FORMATS", (*log_formats.FORMATS, new))
    logged = read_rollouts(path)
    first = logged.responses[0]
    assert logged.host == "a new trainer" and len(logged.responses) == 2
    assert (first.prompt_ids, first.response_ids, first.mask) == ((5, 12), (3, 4), (True, False))
    assert (first.logprobs, first.trainer_logprobs) == ((-0.5, 0.0), (-0.25, -4.0))
    assert (first.versions, first.step, first.settings) == (("7",), "8", {"temperature": 0.5})
    assert first.routes is not None and first.routes.experts.shape == (3, 4, 4)
    path.write_text(json.dumps(row | {"nll_free": None}))
    with pytest.raises(RecordError, match=r"line 1 has no nll_free\. Set log_ids\."):
        read_rollouts(path)
    path.write_text(json.dumps(row | {"nll_free": [-0.5, "x"]}))
    with pytest.raises(RecordError, match=r"line 1: nll_free\.1: Input should be a valid number, found x"):
        read_rollouts(path)
    path.write_text(json.dumps({"text": "1+1="}))
    with pytest.raises(RecordError, match="read are .*, a new trainer's dump"):
        read_rollouts(path)


PLAIN = {"prompt_ids": [5, 12], "response_ids": [3], "rollout_logprobs": [-0.1]}


def plain(folder: Path, *rows: dict[str, Any]) -> Path:
    """Write the lines that a loop without this package would write."""
    path = folder / "plain.jsonl"
    path.write_text("".join(json.dumps(PLAIN | row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_plain_line_gives_its_version_its_step_and_says_what_is_not_read(tmp_path: Path) -> None:
    found = read_rollouts(
        plain(tmp_path, *[{"weight_version": v, "reward": 1.0, "dtype": "bfloat16"} for v in (3, 4, 4)])
    )
    assert found.versions == {"3": 1, "4": 2} and not found.settings
    assert found.said(False).endswith("keys of the rows that were not used: dtype, reward")
    found = read_rollouts(plain(tmp_path, {"provenance": {"weight_version": 3, "top_p": 0.9}}))
    assert "not used: provenance.top_p" in found.said(False)
    with pytest.raises(RecordError, match="line 1: weight_version is 4, and provenance.weight_version 3"):
        read_rollouts(plain(tmp_path, {"weight_version": 4, "provenance": {"weight_version": 3}}))
    with pytest.raises(RecordError, match=r"it has unknown \(1 responses\). The key `weight_version` of a row holds"):
        read_rollouts(plain(tmp_path, {}), "0")
    assert read_rollouts(plain(tmp_path, {"step": 1}, {"step": 2})).versions == {"1": 1, "2": 1}, "as good as versions"
    assert "not used" not in read_rollouts(written(tmp_path, record((-0.1,), (True,)))).said(False)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (
            (1, 2, 2),
            "steps: 82% of the whole log's 1.1e-01 nats per token is beyond what version 4 has. The log spans several",
        ),
        (
            (2, 2, 2),
            "staleness: 82% of the whole log's 1.1e-01 nats per token is beyond what version 4 has. Sync weights",
        ),
    ],
)
def test_several_versions_are_stale_only_if_one_step_trained_on_them(
    steps: tuple[int, ...], words: str, tmp_path: Path
) -> None:
    rows = [{"weight_version": v, "step": step} for v, step in zip((3, 4, 4), steps, strict=True)]
    logged = read_rollouts(plain(tmp_path, *rows))
    assert of_nearest(logged, logged.sample(), np.array([-0.4, -0.11, -0.13]))[1][2].startswith(words)


def test_the_trainers_own_scores_in_a_log_are_those_of_the_sampled_tokens(tmp_path: Path) -> None:
    two = {"response_ids": [3, 4], "rollout_logprobs": [-0.1, None], "response_mask": [True, False]}
    logged = read_rollouts(plain(tmp_path, *[two | {"trainer_logprobs": [-0.3, None]}] * 2))
    scored = logged.trainer(logged.sample())
    assert scored is not None and scored.tolist() == [-0.3, -0.3]
    some = read_rollouts(plain(tmp_path, two, two | {"trainer_logprobs": [-0.3, -0.1]}))
    np.testing.assert_array_equal(some.trainer(some.sample()), [np.nan, -0.3])
    bare = read_rollouts(plain(tmp_path, two, two))
    assert bare.trainer(bare.sample()) is None
    with pytest.raises(RecordError, match="line 1: 1 trainer_logprobs for 2 response_ids"):
        read_rollouts(plain(tmp_path, two | {"trainer_logprobs": [-0.3]}))


def test_responses_that_were_sampled_otherwise_are_named(tmp_path: Path) -> None:
    path = written(tmp_path, *[record((-0.1,), (True,), provenance=provenance(temperature=t)) for t in (1.0, 0.7)])
    with pytest.raises(RecordError, match=r"line 2 was sampled with temperature=0.7, and .*line 1 with 1.0"):
        _ = read_rollouts(path).settings


def test_routes_of_another_model_are_named(tmp_path: Path) -> None:
    found = read_rollouts(FILES / "own.jsonl")
    with pytest.raises(RoutingError, match="line 1: its routes are of experts per layer 16, the model has 8"):
        found.sample(RoutingShape(num_layers=4, layers=(0, 1, 2, 3), num_experts=8, top_k=4))
    with pytest.raises(RoutingError, match="holds routes, and the model has no experts"):
        found.sample()
    lines = (FILES / "own.jsonl").read_text(encoding="utf-8").splitlines()
    bare = json.loads(lines[0])
    del bare["routes"]
    (tmp_path / "some").write_text("\n".join([*lines, json.dumps(bare)]), encoding="utf-8")
    with pytest.raises(RecordError, match="4 of 5 responses have routes"):
        read_rollouts(tmp_path / "some").sample(SHAPE)


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_what_could_run_code_is_not_unpickled(tmp_path: Path) -> None:
    sample = {"tokens": [1, 2], "response_length": 1, "rollout_log_probs": [-1.0], "metadata": Trap(tmp_path / "ran")}
    torch.save({"rollout_id": 0, "samples": [sample, sample]}, tmp_path / "0.pt")
    with pytest.raises(RecordError, match="0.pt holds objects that are not unpickled") as raised:
        read_rollouts(tmp_path / "0.pt")
    assert "\n" not in str(raised.value) and not (tmp_path / "ran").exists()
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps([sample]))
    with pytest.raises(RecordError, match="plain.pkl is neither text nor a file of torch.save"):
        read_rollouts(tmp_path / "plain.pkl")
    assert not (tmp_path / "ran").exists()
    # A reward of numpy's is no hindrance.
    torch.save(
        {"rollout_id": 0, "samples": [sample | {"metadata": {}, "reward": np.float32(1)}] * 2}, tmp_path / "1.pt"
    )
    assert len(read_rollouts(tmp_path / "1.pt").responses) == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rollout_log_probs": None}, "sample 1 has no rollout_log_probs"),
        ({"rollout_log_probs": [-1.0, -1.0]}, "sample 1: 2 logprobs for 1 response_ids"),
        ({"response_length": 2}, "sample 1: its first token counts as sampled; a prompt must have a token"),
        ({"rollout_routed_experts": [0.5]}, "sample 1: rollout_routed_experts is torch.float32"),
        ({"tokens": None}, "sample 1: tokens: Input should be a valid list, found None"),
    ],
)
def test_a_sample_of_slimes_that_cannot_be_used_is_named(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    sample = {"tokens": [1, 2], "response_length": 1, "rollout_log_probs": [-1.0]}
    torch.save({"rollout_id": 0, "samples": [sample, sample | fields]}, tmp_path / "0.pt")
    with pytest.raises(MismatchError) as raised:
        read_rollouts(tmp_path / "0.pt").sample()
    assert words in str(raised.value)


def test_a_file_that_is_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="none.jsonl cannot be read"):
        read_rollouts(tmp_path / "none.jsonl")
    for name, data, words in (
        (
            "a.parquet",
            b"PAR1\x15\x04\x90PAR1",
            "a.parquet is parquet, as TRL's log_completions writes it, which holds texts alone",
        ),
        ("cut.pt", (FILES / "slime_0.pt").read_bytes()[:4000], "cut.pt is a damaged file of torch.save"),
        ("cut.jsonl", (FILES / "own.jsonl").read_bytes()[:-40], "line 4 is no JSON"),
        ("text", b"{\n", "line 1 is no JSON"),
        ("empty", b"\n\n", "empty is empty"),
        ("bytes", b"\xdc\x00\x02", "bytes is neither text nor a file of torch.save, first bytes dc 00 02"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(RecordError, match=words):
            read_rollouts(tmp_path / name)
    torch.save([1, 2], tmp_path / "other.pt")
    with pytest.raises(RecordError, match="other.pt is a list; it must be an object"):
        read_rollouts(tmp_path / "other.pt")


def test_a_line_ends_where_json_lines_end_not_at_other_separators_of_unicode(tmp_path: Path) -> None:
    row = {"prompt_ids": [1], "response_ids": [2], "rollout_logprobs": [-1.0], "output": "a\u2028b\u0085c"}
    (tmp_path / "own.jsonl").write_text(f"{json.dumps(row, ensure_ascii=False)}\r\n" * 2, encoding="utf-8", newline="")
    assert len(read_rollouts(tmp_path / "own.jsonl").responses) == 2


@pytest.mark.parametrize(
    ("keys", "late"),
    [
        ([{"step": 3}, {"step": 4}], False),
        ([{"weight_version": 3}, {"weight_version": 3}], False),
        ([{"weight_version": 3, "step": 3}, {"weight_version": 4, "step": 4}], False),
        ([{"weight_version": 3, "step": 4}, {"weight_version": 4, "step": 4}], True),
        ([{"weight_version": 3}, {"weight_version": 4}], True),
    ],
)
def test_steps_and_versions_tell_whether_the_trainer_scored_with_later_weights(
    keys: list[dict[str, int]], late: bool, tmp_path: Path
) -> None:
    (tmp_path / "log.jsonl").write_text("\n".join(json.dumps(GOOD | more) for more in keys))
    assert read_rollouts(tmp_path / "log.jsonl").scored_late is late
    version = str(keys[0].get("weight_version", keys[0].get("step")))
    assert read_rollouts(tmp_path / "log.jsonl", version).scored_late is late, "the versions that are left out count"


@pytest.mark.parametrize(
    ("value", "sound"),
    [(0.8, True), (1, True), (0, True), (None, True), ("0.8", False), (True, False), (-1, False), (float("nan"), False),
     (float("inf"), False)],
)  # fmt: skip
def test_a_temperature_is_a_number_that_an_engine_can_sample_at(value: Any, sound: bool, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps(GOOD | {"provenance": {"sampling": {"temperature": value}}}))
    if sound:
        assert read_rollouts(log).settings.get("temperature") == value
    else:
        with pytest.raises(
            RecordError, match=f"line 1: the sampling temperature is {value!r}; it must be a number > 0"
        ):
            read_rollouts(log)
