"""Two processes over gloo under `accelerate launch`, DDP and FSDP2: with TRL's generation, and with a vLLM engine each."""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cpu import without_float16_packing
from tests.peers.scenarios import named
from tests.peers.trl.ranks import check_ranks, launch, of, series
from tests.rendezvous import rendezvous

if TYPE_CHECKING:
    from tests.peers.trl import scenarios_alone as alone
    from tests.peers.trl import scenarios_bad_ranks as bad_ranks
    from tests.peers.trl import scenarios_ranks as scenarios
else:
    alone = named("tests.peers.trl.scenarios_alone")
    bad_ranks = named("tests.peers.trl.scenarios_bad_ranks")
    scenarios = named("tests.peers.trl.scenarios_ranks")

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", params=["ddp", pytest.param("fsdp2", marks=pytest.mark.nightly)])
def kind(request: pytest.FixtureRequest) -> str:
    """Return how the model is spread over the ranks."""
    return str(request.param)


@pytest.fixture(scope="module")
def ranks(kind: str, moe: Path, dense: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each rank found with transformers' generation."""
    found = launch(kind, scenarios.transformers, tmp_path_factory.mktemp(kind), model=moe, dense=dense).expect()
    assert len(found) == 2
    return found


@pytest.fixture(scope="module")
def engines(kind: str, moe: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each rank found with a vLLM engine of its own."""
    found = launch(kind, scenarios.engines, tmp_path_factory.mktemp(kind), model=moe).expect()
    assert len(found) == 2
    return found


def test_no_rank_waits_for_one_that_logs_by_itself(dense: Path, tmp_path: Path) -> None:
    main, other = launch("ddp", scenarios.alone, tmp_path, limit=60, dense=dense).expect()
    assert main["logged"] == [1.0, 2.0] and other["logged"] == []


def test_replay_of_own_routes_changes_no_bit(kind: str, ranks: list[dict[str, Any]]) -> None:
    for setting, forwards in (("plain", 3), ("accumulation", 6)):
        stock = of(ranks, "replay", f"{setting} stock")
        check_ranks(kind, stock)
        replayed = of(ranks, "replay", f"{setting} R2")
        check_ranks(kind, replayed)
        assert replayed[0]["parameters"] == stock[0]["parameters"]
        for name in ("loss", "grad_norm"):
            assert series(replayed[0], name) == series(stock[0], name), name
        assert series(replayed[0], "mismatch/routing/set_mismatch_frac") == [0.0] * 3
        # Each rank replays every micro-batch of its own.
        assert [rank["forwards"] for rank in replayed] == [forwards] * 2


def test_routes_of_the_other_rank_change_what_is_learned(kind: str, ranks: list[dict[str, Any]]) -> None:
    others = of(ranks, "replay", "others")
    check_ranks(kind, others)
    assert min(sum(rank["exchanged"]) for rank in others) > 0
    assert others[0]["parameters"] != ranks[0]["replay"]["plain R2"]["parameters"]
    assert max(series(others[0], "mismatch/routing/set_mismatch_frac")) > 0.2


def test_agreement_is_that_of_both_ranks(ranks: list[dict[str, Any]]) -> None:
    others = of(ranks, "replay", "others")
    differing = 0
    for step, entry in enumerate(others[0]["logged"]):
        mine = [rank["heard"]["agreement"][step] for rank in others]
        tokens = [one["tokens"] for one in mine]
        # Two layers.
        shares = [sum(one["set_mismatches"]) / (2 * one["tokens"]) for one in mine]
        differing += shares[0] != shares[1]
        assert entry["mismatch/routing/compared_tokens"] == sum(tokens)
        union = (shares[0] * tokens[0] + shares[1] * tokens[1]) / sum(tokens)
        assert entry["mismatch/routing/set_mismatch_frac"] == pytest.approx(union, rel=1e-12)
    # Or the figure of rank 0 alone would pass.
    assert differing >= 2


def test_kl_and_its_coefficient_are_those_of_both_ranks(kind: str, ranks: list[dict[str, Any]]) -> None:
    found = of(ranks, "metrics")
    check_ranks(kind, found)
    # A measurement for the controller, which has the old log-probabilities, and one for the log.
    calls = [rank["heard"]["kl"] for rank in found]
    assert [len(call) for call in calls] == [6, 6]
    for step, entry in enumerate(found[0]["logged"]):
        (tokens, total), (others, other_total) = calls[0][2 * step + 1], calls[1][2 * step + 1]
        union = (total + other_total) / (tokens + others)
        assert entry["mismatch/kl_ref_k1"] == pytest.approx(union, rel=1e-5, abs=1e-9)
        if step:
            assert abs(total / tokens - other_total / others) > 1e-4
    # By hand: errors are clipped to 0.2 either way, the gains are 0.1 on the error and 0.05 on its sum. The first KL is 0, the
    # second far above the target.
    wanted = [0.05, 0.05 * math.exp(0.1 * -0.2 + 0.05 * -0.2), 0.05 * math.exp(0.1 * 0.2)]
    assert series(found[0], "mismatch/kl_coef") == pytest.approx(wanted, rel=1e-12)


def test_lengths_are_those_of_both_ranks(ranks: list[dict[str, Any]]) -> None:
    found = of(ranks, "metrics")
    for step, entry in enumerate(found[0]["logged"]):
        lengths = [rank["heard"]["lengths"][step] for rank in found]
        assert lengths[0] != lengths[1]
        assert entry["completions/mean_length"] == statistics.mean(lengths[0] + lengths[1])


def test_evaluation_is_that_of_both_ranks(ranks: list[dict[str, Any]]) -> None:
    first, second = of(ranks, "metrics")
    assert first["evaluated"] == second["evaluated"]
    (mine,), (others,) = first["own"], second["own"]
    assert mine != others
    tokens = mine["tokens"] + others["tokens"]
    assert first["evaluated"]["eval_mismatch/routing/compared_tokens"] == tokens > max(mine["tokens"], others["tokens"])


def test_a_rank_whose_responses_are_shorter(kind: str, ranks: list[dict[str, Any]]) -> None:
    """Sharded, it goes on running the model until the other rank has finished: those passes are no tokens of its own."""
    stock, replayed = of(ranks, "uneven", "stock"), of(ranks, "uneven", "R2")
    check_ranks(kind, replayed)
    assert replayed[0]["parameters"] == stock[0]["parameters"]
    assert series(replayed[0], "mismatch/routing/set_mismatch_frac") == [0.0] * 3


def test_resumes_at_the_same_step(kind: str, ranks: list[dict[str, Any]]) -> None:
    for name in ("routing", "kl"):
        first, resumed = of(ranks, "resumed", f"{name} first"), of(ranks, "resumed", f"{name} resumed")
        check_ranks(kind, resumed)
        assert resumed[0]["logged"][-1] == first[0]["logged"][-1], name
        assert resumed[0]["parameters"] == first[0]["parameters"], name
    # The controller's state was not the one that a run starts from.
    assert series(first[0], "mismatch/kl_coef")[2] != 0.05


def test_the_rate_follows_the_mean_over_both_ranks(kind: str, ranks: list[dict[str, Any]]) -> None:
    found = of(ranks, "rate")
    check_ranks(kind, found)
    assert [rank["heard"]["lengths"] for rank in found] == [
        [[4] * 4] * 6,
        [[4] * 4, [4] * 4, [8] * 4, [16] * 4, [16] * 4, [16] * 4],
    ]
    # A surge is twice the first two lengths: at step 3, and the period is round(1.8 * 3). Rank 1 alone would have it at step 2,
    # rank 0 never.
    assert series(found[0], "mismatch/lr_multiplier") == [1.0, 1.0, 1.0, 1.0, 1.0, 0.5]
    # Two steps of warm-up, then half a cosine over four: cos(pi/4) and cos(3 pi/4) at the fourth and sixth.
    schedule = [0.0, 5e-4, 1e-3, 8.535533905932737e-4, 5e-4, 1.4644660940672628e-4]
    applied = [*schedule[:5], 0.5 * schedule[5]]
    for rank in found:
        assert rank["rates"] == pytest.approx(applied, rel=1e-12)
        assert series(rank, "learning_rate") == rank["rates"]


def test_an_alarm_stops_both_ranks(kind: str, ranks: list[dict[str, Any]]) -> None:
    found = of(ranks, "stopped")
    check_ranks(kind, found)
    for rank in found:
        assert rank["step"] == 2 and "checkpoint-2" in rank["saved"]


def test_what_ranks_or_shards_do_not_allow_is_refused_before_the_engine(kind: str, ranks: list[dict[str, Any]]) -> None:
    expected = {"normalize": "ConfigError: mismatch.correction.normalize: "}
    if kind == "fsdp2":
        expected["reference"] = "ConfigError: a reference model with FSDP2 and fsdp_cpu_ram_efficient_loading=true"
    for found in of(ranks, "refused"):
        assert {name: message[: len(expected[name])] for name, message in found.items()} == expected


def test_an_engine_for_each_rank(kind: str, engines: list[dict[str, Any]]) -> None:
    check_ranks(kind, engines)
    heard = [rank["heard"] for rank in engines]
    assert heard[0]["lengths"] != heard[1]["lengths"]
    for step, entry in enumerate(engines[0]["logged"]):
        (tokens, total, largest), (others, other_total, other_largest) = (one["gap"][step] for one in heard)
        assert entry["mismatch/tokens"] == tokens + others
        union = (total + other_total) / (tokens + others)
        assert entry["mismatch/logp_abs_diff_mean"] == pytest.approx(union, rel=1e-6)
        assert entry["mismatch/logp_abs_diff_max"] == pytest.approx(max(largest, other_largest), rel=1e-6)
        # Both engines hold the present weights: stale ones are a thousand times further off (0.05 in float16).
        assert entry["mismatch/logp_abs_diff_mean"] < (1e-5 if kind == "ddp" else 1e-2)
    for rank in engines:
        assert rank["weight_version"] == 3
        # Sharded, the last update comes after a step that an overflow has stopped.
        assert rank["verdict"] == ("in_sync" if kind == "ddp" else "unchanged")
        assert rank["forwards"] == 6


def test_sampling_masks_are_replayed_where_the_output_projection_is_sharded(
    kind: str, engines: list[dict[str, Any]]
) -> None:
    if kind == "ddp":
        assert of(engines, "masked") == [None, None]  # nothing is sharded
        return
    found = of(engines, "masked")
    check_ranks(kind, found)
    for rank in found:
        # Over the whole vocabulary the mass that truncation cuts off would stand in it: 0.02 and more.
        assert max(series(rank, "mismatch/logp_abs_diff_mean")) < 1e-5
        assert (
            1 < min(series(rank, "mismatch/sampling_mask_size"))
            and max(series(rank, "mismatch/sampling_mask_size")) <= 8
        )
        assert series(rank, "mismatch/routing/set_mismatch_frac") == [0.0] * 2


def test_an_overflow_in_one_shard_stops_the_step_of_both(engines: list[dict[str, Any]], kind: str) -> None:
    if kind == "ddp":
        assert of(engines, "scales") == [[], []]  # float32
        return
    for rank in engines:
        (scale, before), (after_first, moved), (after_second, kept) = rank["scales"]
        assert [scale, after_first, after_second] == [256.0, 256.0, 128.0]
        assert moved != before and kept == moved != rank["parameters"]
        assert series(rank, "mismatch/overflow_steps") == [0.0, 1.0, 1.0]


def test_an_error_on_one_rank_ends_both(moe: Path, tmp_path: Path) -> None:
    ran = launch("ddp", scenarios.one_fails, tmp_path, model=moe)
    assert ran.code != 0 and ran.result is None
    assert "the loss was computed without a replayed forward pass" in ran.stderr
    assert "Timeout" not in ran.stderr


# What the case ends with on both ranks; one of them fails in it.
ENDS = {
    "turns": "sent 2 times",
    "alone": "sent [0, 1]",  # TRL's own, when an engine wakes up
    "moved": "sent 1 times",
    "update": "load_weights failed",
    "audit": "sent in bfloat16",
    "stale": "the engine is stale",
    "engine": "engine is gone",
    "rollouts": "1 response tokens, 2 log-probabilities",
    "masks": "more tokens are left",
    "measured begin": "verifies True, 1 failed",
    "measured score": "verifies True, 1 failed",
    "measured rollouts": "verifies True, 1 failed",
    "mistaken score": "a mistake of ours",
    "mistaken rollouts": "'NoneType' object is not iterable",
    "served update": "the server is gone",
    "served answer": "the server holds other weights",
    "served routes": "got [",
    "served unreadable": "no base64",
    "sampling": "another temperature",
    "records": "other tokens",
    "routes": "routes of other tokens",
    "gap": "not finite",
    "correction": "no weights",
    "baseline": "baseline [",
    "controller": "no KL",
}


def test_no_rank_waits_for_one_that_fails_before_a_collective() -> None:
    meet = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true", **rendezvous()}
    command = [sys.executable, "-m", "tests.peers.trl.rank_errors"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), *ENDS],
            env={**os.environ, **meet, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=300)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    found = [dict(line.split(": ", 1) for line in lines if line.split(": ")[0] in ENDS) for lines in told]
    for ends in found:
        assert {name: words for name, words in ENDS.items() if words not in ends.get(name, "")} == {}
    for case in ("mistaken score", "mistaken rollouts"):
        assert "OtherRankError: rank 1: " in found[0][case] and "OtherRankError" not in found[1][case]
    assert [ends["served routes"] for ends in found] == ["got [0, 1]", "got [2, 3]"]
    # Of four samples of one prompt, two have a KL of 0.5 a token and two, on the other rank, of -0.5.
    assert [ends["baseline"] for ends in found] == [
        "baseline [-0.5, -0.333, -0.167] by 1 object",
        "baseline [0.5, 0.333, 0.167] by 1 object",
    ]


@pytest.mark.parametrize("kind", ["fsdp2", pytest.param("ddp", marks=pytest.mark.nightly)])
def test_a_rank_samples_by_itself_as_it_does_without_a_config(
    kind: str, dense_fp16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in without_float16_packing().items():
        monkeypatch.setenv(name, value)
    found = launch(kind, alone.sampled, tmp_path, limit=240, model=dense_fp16).expect()
    for name in ("stock", "measured", "sections"):
        check_ranks(kind, of(found, name))
        main, other = of(found, name)
        assert len(main["samples"]) == 2 and other["samples"] == []
    stock, measured, sections = (found[0][name] for name in ("stock", "measured", "sections"))
    # A sample is of the weights that the engine has: an update on one rank alone would leave the other behind.
    assert measured["samples"] == stock["samples"] and measured["parameters"] == stock["parameters"]
    for rank in found:
        assert rank["measured"]["versions"] == rank["sections"]["versions"] == [1, 2]
    assert sections["samples"][0] == stock["samples"][0]


@pytest.mark.numeric
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=pytest.mark.nightly)])
def test_one_bad_row_of_32_on_one_rank_has_no_weight_on_both(kind: str, dense: Path, tmp_path: Path) -> None:
    found = launch(kind, bad_ranks.one_bad_row, tmp_path, model=dense).expect()
    weightless, spoiled = of(found, "None"), of(found, "nan")
    check_ranks(kind, spoiled)
    assert spoiled[0]["parameters"] == weightless[0]["parameters"]
    # The row would have had a part in the step.
    assert weightless[0]["slope"] == 0 < weightless[1]["slope"]
    for rank in spoiled:
        assert [entry.get("mismatch/bad_rows/rollout_logprobs") for entry in rank["logged"]] == [None, 1.0, 0.0]
    # The loss of one rank is not finite: the step is taken by neither.
    for rank in of(found, "own pass"):
        assert rank["error"].startswith("NonFiniteLogprobError: the gradient norm of step 2 is nan"), rank["error"]
        assert rank["after"] == rank["before"] and rank["steps"] == 1


@pytest.mark.numeric
def test_rows_that_are_not_finite_are_judged_over_all_ranks(dense: Path, tmp_path: Path) -> None:
    """Each rank has the four rows of a prompt. None is finite on one rank in the first run, and on neither in the second one."""
    found = launch("ddp", bad_ranks.nowhere_finite, tmp_path, model=dense).expect()
    one, both = of(found, "1"), of(found, "2")
    for ranks in (one, both):
        check_ranks("ddp", ranks)
    for rank in one:
        assert rank["steps"] == 3 and rank["checkpoints"] == []
        assert [entry.get("mismatch/bad_rows/old_logprobs") for entry in rank["logged"]] == [None, 4.0, 0.0]
    for rank in both:
        assert rank["steps"] == 2 and rank["checkpoints"] == ["checkpoint-2"]
        assert rank["evidence"] == ["evidence-2.jsonl.gz"]
        assert [entry.get("mismatch/bad_rows/old_logprobs") for entry in rank["logged"]] == [None, 8.0]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_kl_term_that_is_not_finite_on_one_rank_ends_both_before_the_step(
    kind: str, dense: Path, tmp_path: Path
) -> None:
    for rank in launch(kind, bad_ranks.own_pass_with_kl, tmp_path, model=dense).expect():
        assert rank["error"].startswith("NonFiniteLogprobError: the gradient norm of step 2 is nan"), rank["error"]
        assert rank["after"] == rank["before"] and rank["steps"] == 1
