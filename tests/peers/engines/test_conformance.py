"""One suite of assertions on the records of both rollout engines, with one model and the same tokens forced."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from mismatch_ext.adapters.transformers.routing import moe_layout, record_routing
from transformers import AutoModelForCausalLM

from mismatch_ext.versions import installed
from tests.oracle import FACTOR, float32_error
from tests.peers.engines.requests import COUNT, STOP, requests, rows
from tests.peers.engines.sglang_environment import RUN_FIRST, VERSIONS
from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.engines import scenarios_conformance
else:
    scenarios_conformance = named("tests.peers.engines.scenarios_conformance")

pytestmark = pytest.mark.engine
SGLANG = tuple(
    pytest.param(f"sglang {version}", marks=[] if version == RUN_FIRST else pytest.mark.nightly) for version in VERSIONS
)
ENGINES = (*(["vllm"] if installed("vllm") else []), *SGLANG)
Records = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def answers(
    run: Run, moe: Path, sglang_in_float32: Callable[[str, str], dict[str, Any]]
) -> Callable[[str], dict[str, Any]]:
    """Return a function: an engine's records of the same requests, and the verdicts on the same updates of its weights."""

    @cache
    def found(engine: str) -> dict[str, Any]:
        if engine == "vllm":
            return dict(run(scenarios_conformance.vllm, model=moe, **requests()).expect())
        return sglang_in_float32(engine.removeprefix("sglang "), "engine")

    return found


@pytest.fixture(scope="module")
def records(answers: Callable[[str], dict[str, Any]]) -> Records:
    """Return a function: an engine's records of the same requests."""
    return lambda engine: list(answers(engine)["records"])


@pytest.mark.parametrize("engine", ENGINES)
def test_good_stale_and_partial_updates_are_told_apart(answers: Callable[[str], dict[str, Any]], engine: str) -> None:
    found = answers(engine)["updates"]
    assert found["statuses"] == {
        "trained and sent": "in_sync", "sent again": "unchanged", "trained": "stale", "sent": "unchanged",
        "sent whole": "in_sync",
    }, found["messages"]  # fmt: skip
    # Of the last but one only the final norm was sent; fail closed, whichever way it is named.
    assert "weight update 5: " in found["a part sent"] and (
        "stale" in found["a part sent"] or "garbled" in found["a part sent"]
    )
    assert found["version"] == 5
    compared = "tensors are equal bit by bit" in found["messages"]["trained and sent"]
    assert compared == (engine == "vllm")  # SGLang's weights are out of reach


@pytest.fixture(scope="module")
def expected(moe: Path) -> list[dict[str, Any]]:
    """Return what transformers makes of the same requests: greedy tokens, log-probabilities and routes."""
    model = AutoModelForCausalLM.from_pretrained(moe, dtype=torch.float32).eval()
    found = []
    for prompt in rows():
        ids = list(prompt)
        while len(ids) - len(prompt) < COUNT and not (len(ids) > len(prompt) and ids[-1] in (1, *STOP)):
            with torch.no_grad():
                ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        with torch.no_grad(), record_routing(model) as recording:
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        scores = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[1:, None])[len(prompt) - 1 :, 0]
        layout = moe_layout(model)
        row, counts = torch.tensor([ids]), torch.arange(len(ids))[None] >= len(prompt)
        error = float32_error(model, row, torch.ones_like(row), counts)
        experts = recording.trace.experts[: len(ids) - 1].tolist()
        found.append(
            {
                "prompt": prompt,
                "response": ids[len(prompt) :],
                "logprobs": scores,
                "experts": experts,
                "layout": layout,
                "error": error,
            }
        )
    return found


def rounding(expected: list[dict[str, Any]]) -> float:
    """Return the trainer's own float32 error over all responses, in nats per token."""
    return sum(e["error"] * len(e["response"]) for e in expected) / sum(len(e["response"]) for e in expected)


@pytest.mark.parametrize("engine", ENGINES)
class TestRecords:
    """What a record holds, whichever engine it is of."""

    def test_holds_the_tokens(self, records: Records, expected: list[Any], engine: str) -> None:
        assert [r["prompt_ids"] for r in records(engine)] == [e["prompt"] for e in expected]
        assert [r["response_ids"] for r in records(engine)] == [e["response"] for e in expected]
        assert [r["request_id"] for r in records(engine)] == [str(i) for i in range(len(expected))]
        assert all(r["response_mask"] == [True] * len(r["response_ids"]) for r in records(engine))
        assert all(r["same_traces"] for r in records(engine))

    def test_holds_log_probabilities_before_the_truncation(
        self, records: Records, expected: list[Any], engine: str
    ) -> None:
        gaps = []
        for record, wanted in zip(records(engine), expected, strict=True):
            found = torch.tensor(record["rollout_logprobs"])
            assert found.shape == wanted["logprobs"].shape
            gaps.append(found - wanted["logprobs"])
        assert float(torch.cat(gaps).abs().mean()) < FACTOR * rounding(expected)

    def test_holds_the_routes_of_all_tokens_but_the_last(
        self, records: Records, expected: list[Any], engine: str
    ) -> None:
        for record, wanted in zip(records(engine), expected, strict=True):
            routing, layout = record["routing"], wanted["layout"]
            # As sets: the order of a token's experts is not part of what is replayed.
            found, want = torch.tensor(routing["experts"]), torch.tensor(wanted["experts"])
            assert found.shape == want.shape == (len(record["prompt_ids"]) + len(record["response_ids"]) - 1, 2, 4)
            assert torch.equal(found.sort(-1).values, want.sort(-1).values)
            assert tuple(routing["layers"]) == layout.layers and routing["num_experts"] == layout.num_experts == 16
            assert (routing["start"], routing["dtype"], routing["versions"]) == (0, "torch.uint8", [[0, 0]])

    def test_says_where_it_comes_from(self, records: Records, engine: str) -> None:
        for record in records(engine):
            found = record["provenance"]
            assert found["engine"] == engine.split()[0] and found["dtype"] == "float32" and found["weight_version"] == 0
            assert found["sampling"] == {
                "temperature": 1.0, "top_p": 1.0, "top_k": 1, "min_p": 0.0, "repetition_penalty": 1.0
            }  # fmt: skip


def test_some_responses_stopped_and_some_were_cut(expected: list[dict[str, Any]]) -> None:
    lengths = [len(e["response"]) for e in expected]
    assert min(lengths) < COUNT == max(lengths)
