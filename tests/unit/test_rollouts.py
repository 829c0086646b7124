"""Logged rollouts come back as they were written, and what cannot be used is named by its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch_ext.errors import MismatchError
from mismatch_ext.provenance import Provenance, SamplingSettings
from mismatch_ext.records import RolloutRecord
from mismatch_ext.rollouts import read_rollouts, write_rollouts

PROVENANCE = Provenance(
    engine="vllm", engine_version="0.30.0", dtype="bfloat16", kv_cache_dtype="bfloat16", weight_version=0,
    patch_digest="none", sampling=SamplingSettings(), logprobs_mode="processed_logprobs",
)  # fmt: skip


def record(logprobs: tuple[float, ...], mask: tuple[bool, ...]) -> RolloutRecord:
    return RolloutRecord(
        prompt_ids=(5, 12), response_ids=tuple(range(3, 3 + len(mask))), rollout_logprobs=logprobs, response_mask=mask,
        finish_reason="stop", provenance=PROVENANCE,
    )  # fmt: skip


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    records = [record((-0.1, -2.3), (True, True)), record((-1.0, float("nan"), -0.5), (True, False, True))]
    write_rollouts(records, tmp_path / "rollouts.jsonl")
    found = read_rollouts(tmp_path / "rollouts.jsonl")
    assert found.prompts == ((5, 12), (5, 12)) and found.responses == ((3, 4), (3, 4, 5))
    assert found.masks == ((True, True), (True, False, True))
    assert np.array_equal(found.engine, [-0.1, -2.3, -1.0, -0.5]) and found.row.tolist() == [0, 0, 1, 1]


GOOD: dict[str, Any] = {"prompt_ids": [1], "response_ids": [2, 3], "rollout_logprobs": [-1.0, -2.0]}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"input": "1+1=", "output": "2", "score": 1.0, "step": 1}, "rollout_data_dir, which holds texts alone"),
        ({"prompt_ids": [1], "response_ids": [2]}, "line 2 has no rollout_logprobs"),
        (GOOD | {"rollout_logprobs": [-1.0]}, "response 1: 2 tokens, 2 mask values and 1"),
        (GOOD | {"rollout_logprobs": [-1.0, None]}, "response 1, token 1: the engine's log-probability is nan"),
        (GOOD | {"rollout_logprobs": [-1.0, "x"]}, "line 2: rollout_logprobs must be a list of numbers"),
        (GOOD | {"response_ids": [2, -3]}, "line 2: prompt_ids and response_ids must be lists of token ids"),
        (GOOD | {"response_mask": [1, 2]}, "line 2: response_mask must be"),
        (GOOD | {"response_mask": [[1], [1]]}, "line 2: response_mask must be"),
        (GOOD | {"prompt_ids": []}, "line 2: prompt and response must have a token"),
        ([1], "line 2 is a list"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(row: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps(row)}\n", encoding="utf-8")
    with pytest.raises(MismatchError) as raised:
        read_rollouts(path)
    assert words in str(raised.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="none.jsonl cannot be read"):
        read_rollouts(tmp_path / "none.jsonl")
    (tmp_path / "completions.parquet").write_bytes(b"PAR1\x15\x04\x90PAR1")
    with pytest.raises(MismatchError, match="parquet, as TRL logs completions, which holds texts alone"):
        read_rollouts(tmp_path / "completions.parquet")
    (tmp_path / "text").write_text("{\n")
    with pytest.raises(MismatchError, match="line 1 is no JSON"):
        read_rollouts(tmp_path / "text")
