"""Completions of several turns in the real TRL with vLLM: the gap and the routes with every section on, and planted faults."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.oracle import expect_float32
from tests.peers.scenarios import Run, named
from tests.peers.trl.ranks import launch, series

if TYPE_CHECKING:
    from tests.peers.trl import scenarios_turns as scenarios
    from tests.peers.trl import scenarios_turns_ranks as ranks
else:
    scenarios = named("tests.peers.trl.scenarios_turns")
    ranks = named("tests.peers.trl.scenarios_turns_ranks")

pytestmark = pytest.mark.engine

# What each fault is called; the third completion has it, but for weights, which are all completions'.
NAMED = {
    "rendered again": [r"completion 2: token \d+ of the completion", "The nearest call", "chat template"],
    "changed": [
        r"completion 2: token \d+ of the completion \(id \d+\) counts",
        r"sampled id \d+ as token \d+ of the completion, where id",
    ],
    "dropped": [r"completion 2: (a turn was dropped|token \d+ of the completion \(id \d+\) counts)"],
    "last dropped": [r"completion 2: a turn was dropped: the engine sampled \d tokens"],
    "tool's token": [r"completion 2: token \d+ of the completion", "counts as the policy's, and no call"],
    "log-probabilities": ["completion 2: token 0 of the completion is trained with log-probability"],
    "two versions": ["completion 0, turn 0 has weight_version=3, completion 0, turn 1 has weight_version=4"],
}


def check_named(found: dict[str, Any], words: list[str], *, of_all: bool) -> None:
    """Check that a fault of all completions is an error before the update, and that of one is a bad row."""
    if of_all:
        assert found["error"] == "RecordError" and not found["gradients"], found
        message = found["message"]
    else:
        assert found["error"] == "" and found["gradients"], found
        (message,) = found["bad"]
    assert all(re.search(one, message) for one in words), message


@pytest.fixture(scope="module")
def tools(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what training with tools came to, and what was said of each fault that was planted afterwards."""
    return run(scenarios.tools, out=tmp_path_factory.mktemp("tools")).expect()


@pytest.mark.numeric
def test_three_turns_with_every_section_agree_in_float32(tools: Any) -> None:
    history, (cut, whole) = tools["history"], tools["batches"]
    expect_float32(history, tools["float32_errors"])
    for entry, batch in zip(history, (cut, whole), strict=True):
        assert batch["turns"] == [3] * 8 and batch["gap"] < 1e-4
        # A tool's tokens have no log-probability, and count for nothing.
        assert batch["tool_tokens"] == 8 * 2 * 7 and batch["engine"] == 0.0
        assert entry["mismatch/tokens"] == sum(batch["lengths"]) - batch["tool_tokens"]
        assert entry["mismatch/logp_abs_diff_mean"] < 1e-5 and entry["mismatch/turns"] == 3
        for name in ("set_mismatch_frac", "rerouted_rows", "other_passes"):
            assert entry[f"mismatch/routing/{name}"] == 0.0, name
        assert entry["mismatch/sampling_mask_size"] == 8.0
    assert max(cut["lengths"]) == 26 < max(whole["lengths"])
    # A turn's last token is given to the next turn's prefill, and the completion's to none, unless TRL has cut it there.
    sampled = [entry["mismatch/tokens"] - entry["mismatch/routing/sampled_rows"] for entry in history]
    assert 8 * 2 <= sampled[0] < 8 * 3 and sampled[1] == 8 * 3
    assert min(entry["mismatch/routing/prefilled_rows"] for entry in history) > 8 * 2 * (7 + 1)
    assert history[0]["kl"] == pytest.approx(0.0, abs=1e-9) and history[1]["kl"] > 0
    assert [entry["mismatch/lr_multiplier"] for entry in history] == [1.0, 1.0]


@pytest.mark.parametrize("fault", NAMED)
def test_what_goes_wrong_between_turns_is_named_before_the_update(tools: Any, fault: str) -> None:
    found = tools["faults"][fault]
    check_named(found, NAMED[fault], of_all=fault == "two versions")
    assert found["moved"] == (fault == "two versions")  # which has planted other weights


def test_a_step_without_a_fault_is_taken(tools: Any) -> None:
    expected = {"error": "", "message": "", "gradients": True, "moved": False, "bad": []}
    assert tools["faults"]["none"] == expected


def test_a_config_that_does_not_act_measures_turns_and_tells_what_goes_wrong_between_them(
    run: Run, tmp_path: Path
) -> None:
    found = run(scenarios.measured, out=tmp_path).expect()
    assert found["failed"] == {} and len(found["history"]) == 2
    for entry, batch in zip(found["history"], found["batches"], strict=True):
        assert entry["mismatch/turns"] == 3 and entry["mismatch/k3_kl"] > 0
        assert entry["mismatch/turns/forked_frac"] == entry["mismatch/turns/misplaced_frac"] == 0
        assert entry["mismatch/tokens"] == sum(batch["lengths"]) - batch["tool_tokens"]
    assert found["step"]["error"] == "" and found["step"]["gradients"]
    assert found["failed in it"] == {}
    (message,) = found["step"]["bad"]
    assert all(re.search(words, message) for words in NAMED["rendered again"]), message
    # One of eight completions was given another history in its second turn.
    noted = found["noted in it"]
    assert noted["mismatch/turns/forked_frac"] == 1 / 8 and noted["mismatch/turns/misplaced_frac"] > 0
    causes = {name: value for name, value in noted.items() if "/forked/" in name}
    assert causes == {"mismatch/turns/forked/turn_edited": 1 / 8}


# What a rollout_func does wrong, by what it is called.
OWN = {
    "rendered again": [r"completion 0: token \d+ of the completion .* was given id \d+ as token 0 of the completion"],
    "no mask": [r"completion 0: token \d of the completion \(id \d+\) counts as the policy's, and no call"],
    "vLLM itself": ["vllm_generation.generate has not sampled", "generate with it", "trainer.vllm_generation.llm"],
    "another engine": ["vllm_generation.generate has not sampled", "generate with it", "an engine of your own"],
}


@pytest.fixture(scope="module")
def functions(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what training with a `rollout_func` came to, and what was said of each fault."""
    return run(scenarios.functions, out=tmp_path_factory.mktemp("functions")).expect()


@pytest.mark.numeric
def test_a_function_that_asks_the_engine_agrees_in_float32(functions: Any) -> None:
    # The second training's first weights TRL by itself does not send.
    history, batches = functions["history"], functions["batches"]
    expect_float32(history, functions["errors"])
    assert len(history) == 2 and len(batches) == 3  # the second training's log begins anew
    for batch in batches:
        assert batch["gap"] < 1e-4 and batch["turns"] == [2] * 8 and batch["tool_tokens"] == 8 * 4
    for entry, batch in zip(history, batches[1:], strict=True):
        # Two calls of each batch lead to no completion.
        assert entry["mismatch/turns"] == 2 and entry["mismatch/tokens"] == sum(batch["lengths"]) - 8 * 4
        assert entry["mismatch/routing/set_mismatch_frac"] == entry["mismatch/routing/rerouted_rows"] == 0.0
        assert entry["mismatch/routing/sampled_rows"] == entry["mismatch/tokens"] - 8 * 2


@pytest.mark.parametrize("fault", OWN)
def test_what_a_function_does_wrong_is_named_before_the_update(functions: Any, fault: str) -> None:
    found = functions["faults"][fault]
    check_named(found, OWN[fault], of_all=fault != "rendered again")
    assert not found["moved"]


@pytest.mark.nightly
def test_ranks_of_a_sharded_model_wait_for_no_turn_of_each_other(tmp_path: Path) -> None:
    found = launch("fsdp2", ranks.unequal, tmp_path, limit=200).expect()
    assert found[0]["sharded"] == found[1]["sharded"] == 1.0 and found[0]["parameters"] == found[1]["parameters"]
    for name in ("mismatch/tokens", "mismatch/k3_kl"):
        assert series(found[0], name) == series(found[1], name)
    assert [rank["calls"] for rank in found] == [4, 6]  # in two steps, the first call of each included
    # Completions of two turns on one rank and of three on the other.
    for rank in found:
        assert series(rank, "mismatch/turns") == [2.5, 2.5]
    assert max(series(found[0], "mismatch/logp_abs_diff_mean")) < 1e-5
