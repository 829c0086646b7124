"""Routes that real vLLM records: equal to transformers' on every token in float32, never stale, and refused when malformed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.cpu import has_amx
from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.engines import scenarios_vllm_routing as scenarios
else:
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
    "stop strings": lambda found: {len(stop) for stop in found["stops"]} == {1, 2},
    "min_tokens": lambda found: min(found["lengths"]) >= 8,
    "log-probabilities": lambda found: found["tokens"] > 800,
    "n=3": lambda found: found["completions"] == 18,
}


@pytest.mark.numeric
@pytest.mark.parametrize("way", WAYS)
def test_every_token_is_routed_as_transformers_routes_it(ways: dict[str, Any], way: str) -> None:
    found = ways[way]
    assert found["differing"] == 0 and found["tokens"] > 50
    assert WAYS[way](found), found


def test_the_layer_axis_has_dense_layers_too(ways: dict[str, Any]) -> None:
    # 4 layers, of which the second is dense; 4 experts per token.
    assert ways["plain"]["shape"] == [4, 4] and ways["plain"]["dtype"] == "uint8"


def test_a_groups_prompt_is_stored_once(ways: dict[str, Any]) -> None:
    found = ways["n=3"]
    assert found["shared"] == 12 and found["same"]
    # Of each prompt's rows, two of three copies are saved.
    assert found["saved"] == 2 * found["prompt_bytes"] > 0


def test_capture_survives_whatever_happens_around_it(ways: dict[str, Any]) -> None:
    found = ways["captured"]
    assert found.pop("failure").startswith("VLLMValidationError")
    assert found == {
        "shadowed before": False, "outer": True, "inner": True, "ended": True, "restored": True, "a later shadow stays": True,
        "counted once": 2,
    }  # fmt: skip


@pytest.fixture(scope="module")
def update(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Update the weights of one engine, with and without a reset of its prefix cache."""
    return run(scenarios.update, out=tmp_path_factory.mktemp("update")).expect()


def test_without_a_reset_cached_rows_are_those_of_the_old_weights(update: dict[str, Any]) -> None:
    # What vLLM does: every cached row is the old model's route, and what follows attends to the old model's keys and values.
    stale = update["stale rows"]
    assert stale["cached"] > 500 and stale["of the old weights"] == stale["cached"]
    assert stale["differing"] > 0.9 * stale["cached"]
    assert update["unguarded"]["differing"] >= stale["differing"]


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
    assert "request held/0" in held["unfinished"] and "not finished" in held["unfinished"]


@pytest.fixture(scope="module")
def scarce(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Sample from an engine with few tokens per step and few cache blocks."""
    return run(scenarios.scarce, out=tmp_path_factory.mktemp("scarce")).expect()


def test_chunked_prompts(scarce: dict[str, Any]) -> None:
    found = scarce["chunked"]
    # Eight prompts of 100 to 150 tokens in steps of 48.
    assert found["longest_step"] == 48 and found["prompt_parts"] > 16
    assert found["differing"] == 0 and found["tokens"] > 1000


@pytest.mark.parametrize("name", ["preempted", "preempted again", "preempted groups"])
def test_preempted_requests(scarce: dict[str, Any], name: str) -> None:
    found = scarce[name]
    assert found["preemptions"] >= 5
    assert found["differing"] == 0 and found["tokens"] > 1500


@pytest.fixture(scope="module")
def families(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Sample from engines of other families."""
    names = ["deepseek_v3", "glm4_moe", "olmoe", "wide"]
    return run(scenarios.families, out=tmp_path_factory.mktemp("families"), names=names).expect()


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("family", "layers", "dtype"),
    [
        ("deepseek_v3", [1, 2], "uint8"),
        ("glm4_moe", [1, 2], "uint8"),
        ("olmoe", [0, 1, 2], "uint8"),
        ("wide", [0, 1], "uint16"),
    ],
)
def test_other_families(families: dict[str, Any], family: str, layers: list[int], dtype: str) -> None:
    found = families[family]
    assert found["layers"] == layers and found["plain"]["dtype"] == dtype
    assert found["plain"]["differing"] == found["again"]["differing"] == 0
    # On a CPU, vLLM turns its prefix cache off for latent attention.
    assert found["again"]["tokens"] > 800 and (found["again"]["cached"] > 100) == (family != "deepseek_v3")


@pytest.mark.numeric
def test_latent_attention_in_float32_is_refused_where_vllm_chooses_amx(
    run: Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """vLLM takes its AMX kernels for latent attention wherever the CPU has AMX, and they are of bfloat16 alone."""
    found = run(scenarios.latent_attention, out=tmp_path_factory.mktemp("latent")).expect()
    if has_amx():
        assert found["refused"].startswith("expect weight to be bfloat16"), found
    else:
        assert found["refused"] == "" and found["differing"] == 0 and found["tokens"] > 400


@pytest.mark.nightly
def test_two_tensor_parallel_ranks_in_processes_of_their_own(
    run: Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = run(scenarios.processes, out=tmp_path_factory.mktemp("processes"), tensor_parallel_size=2,
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    ).expect()  # fmt: skip
    assert all(one["differing"] == 0 and one["tokens"] > 300 for one in found.values())
    assert [one["cached"] > 0 for one in found.values()] == [False, True, False]


@pytest.fixture(scope="module")
def faults(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Spoil what an engine returned, each time in another way."""
    return run(scenarios.faults, out=tmp_path_factory.mktemp("faults")).expect()


FAULTS = {
    "missing row": ["request 1/0", "40 rows for 42 tokens", "1 missing"],
    "extra row": ["request 1/0", "42 rows for 42 tokens", "1 surplus"],
    "a token cut off": ["request 1/0", "41 rows for 41 tokens", "1 surplus"],
    "another request's": ["request 1/0", "10 surplus"],
    "layers rotated": ["request 1/0, layer 1", "MoE layers are (0, 2, 3)", "another order"],
    "dense layer swapped with the next": ["request 1/0, layer 1", "another order"],
    "layers in another order": ["routing shape layers=(2, 0, 3)", "ascending decoder indices"],
    "layers of another model": ["request 0/0, layer 1", "did not capture this layer"],
    "too few layers": ["request 1/0, layer 2", "did not capture this layer"],
    "all zeros": ["request 1/0, layer 0", "all expert ids are zero"],
    "one layer zero": ["request 1/0, layer 2", "all expert ids are zero"],
    "one row zero": ["request 1/0, row 5, layer 0", "duplicate expert ids [0, 0, 0, 0]"],
    "duplicate ids": ["request 1/0, row 3, layer 2", "duplicate expert ids [7, 1, 7, 2]"],
    "id out of range": ["request 1/0, row 3, layer 2", "expert id 16 is out of range; allowed: 0 to 15"],
    "wrong expert count": ["request 0/0, row 0", "out of range; allowed: 0 to 7"],
    "wrong experts per token": ["request 0/0", "4 experts per token; allowed: 2"],
    "floats": ["request 1/0", "float32", "integers"],
    "flag off": ["request 1/0", "no routing", "enable_return_routed_experts=True"],
    "another model's layers": ["MoE layers (0, 2, 3), the model (0, 1, 3)"],
    "engine without the flag": ["does not record routing", "enable_return_routed_experts=True"],
    "outputs without the flag": ["request 0/0", "no routing", "enable_return_routed_experts=True"],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_with_its_own_message(faults: dict[str, Any], fault: str) -> None:
    found = faults[fault]
    assert found["message"].startswith("RoutingError: "), found["message"]
    assert all(words in found["message"] for words in FAULTS[fault]), found["message"]
    assert found["seconds"] < 1


def test_swapped_layers_show_in_the_agreement_alone(faults: dict[str, Any]) -> None:
    # Layers 0 and 3 of one engine's routes exchanged: valid ids, which no check of a trace can refuse.
    share = {int(layer): value for layer, value in faults["agreement with swapped layers"].items()}
    assert share[2] == 0 and share[0] == share[3] > 0.9
