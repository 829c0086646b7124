"""Routes that real vLLM records: equal to transformers' on every token in float32, never stale, and refused when malformed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.peers.scenarios import Run, named

scenarios = named("tests.peers.engines.scenarios_vllm_routing")

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def ways(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Sample in every way from one engine."""
    return run(scenarios.ways, out=tmp_path_factory.mktemp("ways")).expect()


WAYS = {
    # What proves that the case is what it says.
    "plain": lambda found: found["cached"] == 0 and len(found["lengths"]) > 5,
    "same prompts again": lambda found: found["cached"] > 500,
    "shared prefixes": lambda found: found["cached"] > 300,
    # More than the prompts of 704 cached tokens: completions are prefixes too.
    "a second turn": lambda found: found["cached"] > 704,
    "max_tokens=1": lambda found: found["lengths"] == [1],
    "stop token": lambda found: found["stops"] == ["5", "6"] and found["reasons"] == ["length", "stop"],
    "n=3": lambda found: found["completions"] == 18,
}


@pytest.mark.numeric
@pytest.mark.parametrize("way", WAYS)
def test_every_token_is_routed_as_transformers_routes_it(ways: dict[str, Any], way: str) -> None:
    found = ways[way]
    assert found["differing"] == 0 and found["tokens"] > 50
    assert WAYS[way](found), found


@pytest.fixture(scope="module")
def update(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Update the weights of one engine, with and without a reset of its prefix cache."""
    return run(scenarios.update, out=tmp_path_factory.mktemp("update")).expect()


@pytest.mark.parametrize("name", ["before", "new version", "updated inside", "guarded", "after abort"])
def test_after_an_update_or_under_another_version_no_prefix_is_cached(update: dict[str, Any], name: str) -> None:
    assert update[name]["cached"] == 0 and update[name]["differing"] == 0


@pytest.mark.parametrize("name", ["same version", "new version again"])
def test_a_capture_under_the_same_version_keeps_them(update: dict[str, Any], name: str) -> None:
    assert update[name]["cached"] > 500 and update[name]["differing"] == 0


def test_a_reset_that_vllm_declines_is_an_error(update: dict[str, Any]) -> None:
    held = update["held"]
    assert held["stock"] is False  # and a line in the log: a caller that ignores the value goes on with stale blocks
    for message in (held["ours"], held["capture"]):
        assert message.startswith("EngineError: vLLM did not reset its prefix cache") and "abort" in message
    assert held["captured"] == 0


@pytest.fixture(scope="module")
def scarce(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Sample from an engine with few tokens per step and few cache blocks."""
    return run(scenarios.scarce, out=tmp_path_factory.mktemp("scarce")).expect()


def test_chunked_prompts(scarce: dict[str, Any]) -> None:
    found = scarce["chunked"]
    # Eight prompts of 100 to 150 tokens in steps of 48.
    assert found["longest_step"] == 48 and found["prompt_parts"] > 16
    assert found["differing"] == 0 and found["tokens"] > 1000


def test_preempted_requests(scarce: dict[str, Any]) -> None:
    found = scarce["preempted"]
    assert found["preemptions"] >= 5
    assert found["differing"] == 0 and found["tokens"] > 1500


@pytest.fixture(scope="module")
def families(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Sample from engines of other families."""
    names = ["deepseek_v3", "wide"]
    return run(scenarios.families, out=tmp_path_factory.mktemp("families"), names=names).expect()


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("family", "layers", "dtype"),
    [
        ("deepseek_v3", [1, 2], "uint8"),
        ("wide", [0, 1], "uint16"),
    ],
)
def test_other_families(families: dict[str, Any], family: str, layers: list[int], dtype: str) -> None:
    found = families[family]
    assert found["layers"] == layers and found["plain"]["dtype"] == dtype
    assert found["plain"]["differing"] == found["again"]["differing"] == 0
    # On a CPU, vLLM turns its prefix cache off for latent attention.
    assert found["again"]["tokens"] > 800 and (found["again"]["cached"] > 100) == (family != "deepseek_v3")


@pytest.mark.nightly
def test_two_tensor_parallel_ranks_in_processes_of_their_own(
    run: Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = run(scenarios.processes, out=tmp_path_factory.mktemp("processes"), tensor_parallel_size=2,
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    ).expect()  # fmt: skip
    assert all(one["differing"] == 0 and one["tokens"] > 300 for one in found.values())
    assert [one["cached"] > 0 for one in found.values()] == [False, True, False]
