"""Recordings of three versions of SGLang: every kind of request that the adapter builds, parsed into records."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from mismatch_ext.adapters.sglang import (
    RoutingShape,
    check_server,
    parse_response,
    read_server,
    to_provenance,
    to_records,
)

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import MismatchError, RoutingError
from mismatch_ext.rollout import Provenance, RolloutRecord, SamplingSettings
from tests.unit.sglang_recorded import FOLDER

FILES = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("cases_*.json"))}
NAMES = [(stem, case["name"]) for stem, data in FILES.items() for case in data["cases"] if case["start"] == 0]


def case(stem: str, name: str) -> dict[str, Any]:
    """Return a recorded request's prompts, settings and responses."""
    return next(found for found in FILES[stem]["cases"] if found["name"] == name)


def shape(stem: str) -> RoutingShape:
    """Return the routing shape of the model that was recorded."""
    return RoutingShape(**FILES[stem]["shape"])


def provenance(stem: str, temperature: float) -> Provenance:
    """Return the provenance that the recorded server's report gives."""
    reading = read_server(FILES[stem]["server_info"])
    return to_provenance(reading, sampling=SamplingSettings(temperature=temperature), weight_version=0)


def records(stem: str, name: str, **changes: Any) -> list[RolloutRecord]:
    """Parse the responses to a recorded request."""
    found = case(stem, name)
    arguments: dict[str, Any] = {
        "prompt_ids": found["ids"],
        "provenance": provenance(stem, found["temperature"]),
        "shape": shape(stem),
        "n": found["n"],
        "weight_version": "default",
    }
    return to_records(found["out"], **(arguments | changes))


@pytest.mark.parametrize(("stem", "name"), NAMES)
def test_every_request_gives_complete_records(stem: str, name: str) -> None:
    found = case(stem, name)
    for record, output in zip(records(stem, name), found["out"], strict=True):
        tokens = len(record.prompt_ids) + len(record.response_ids)
        assert record.routing is not None
        assert record.routing.rows == tokens - 1
        assert record.routing.layers == (0, 1, 2)
        assert list(record.response_ids) == output["output_ids"]
        assert record.provenance.engine_version == FILES[stem]["version"]
        assert record.provenance.sampling.temperature == found["temperature"]
        assert record.finish_reason == ("stop" if name == "stop token" else "length")


@pytest.mark.parametrize("stem", FILES)
def test_a_stop_token_belongs_to_the_response(stem: str) -> None:
    (record,) = records(stem, "stop token")
    end = case(stem, "stop token")["out"][0]["meta_info"]["finish_reason"]["matched"]
    assert record.response_ids.tolist().index(end) == len(record.response_ids) - 1


@pytest.mark.parametrize("stem", FILES)
def test_another_model_is_refused(stem: str) -> None:
    other = RoutingShape(num_layers=4, layers=(0, 1, 2), num_experts=8, top_k=2)
    with pytest.raises(RoutingError, match="routed_experts: .* bytes"):
        records(stem, "stop token", shape=other)


def test_experts_that_ran_in_a_dense_layer_are_seen() -> None:
    data = json.loads((FOLDER / "dense_layer_0.5.18.json").read_text(encoding="utf-8"))
    trainers = RoutingShape(num_layers=3, layers=(1, 2), num_experts=8, top_k=2)
    with pytest.raises(
        RoutingError, match=r"request 0, layer 0: the engine recorded routes here, .*layers are \(1, 2\)"
    ):
        to_records(data["out"], prompt_ids=data["ids"], provenance=provenance(next(iter(FILES)), 1.0), shape=trainers)


@pytest.mark.parametrize("stem", FILES)
def test_the_recorded_server_is_judged_by_its_own_report(stem: str) -> None:
    data = FILES[stem]
    config = MismatchConfig.parse({"precision": {"dtype": data["dtype"]}, "routing": {"mode": "R3"}})
    assert config is not None
    found = check_server(data["server_info"], config=config, trainer_dtype="float32")
    assert found.problems == ()


@pytest.mark.parametrize(("stem", "name"), NAMES)
def test_a_response_without_any_one_of_its_fields_raises_our_errors_or_reads_the_same(stem: str, name: str) -> None:
    found = case(stem, name)
    for record, output in zip(records(stem, name), found["out"], strict=True):
        needed = []
        for field in output["meta_info"]:
            meta = {key: value for key, value in output["meta_info"].items() if key != field}
            try:
                again = parse_response(
                    {**output, "meta_info": meta},
                    prompt_ids=record.prompt_ids,
                    provenance=record.provenance,
                    shape=shape(stem),
                    request_id=record.request_id,
                )
            except MismatchError:
                needed.append(field)
            else:
                assert np.array_equal(again.rollout_logprobs, record.rollout_logprobs)
        logprobs = ["output_token_logprobs"] * bool(len(record.response_ids))
        assert sorted(needed) == sorted(["finish_reason", "routed_experts", *logprobs])
