"""What verl's driver measures chunk by chunk is what it would measure of the whole batch, and errors name rollout and token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.verl.in_process import scenarios_measuring as scenarios
else:
    scenarios = named("tests.peers.verl.in_process.scenarios_measuring")

pytestmark = pytest.mark.numeric


def same(found: Any, expected: Any) -> bool:
    """Tell whether nested numbers are the same but for the order of sums in float64."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[name], value) for name, value in expected.items())
    if isinstance(expected, list):
        return len(found) == len(expected) and all(same(*pair) for pair in zip(found, expected, strict=True))
    return found == expected if expected is None else found == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_chunks_are_the_whole(run: Run) -> None:
    found = run(scenarios.chunks).expect()
    whole = found["whole"]
    assert whole["scalars"]["tokens"] == sum(found["tokens"]) and whole["scalars"]["k3_kl"] > 1e-6
    assert len(found["chunks"]) == 4
    for part in found["chunks"]:
        assert same({name: part[name] for name in whole}, whole)
        assert part["lengths"] == found["tokens"]
        # Tokens of a tool fill a response up, too: the second has 17 places, of which 13 are the policy's.
        assert part["truncated"] == [False, True, False, False, True, False]
        assert part["drawn"] == sum(found["tokens"]) and part["together"][0] == part["together"][1]
    assert found["unscored"] == [None, found["tokens"]]


def test_means_of_a_large_batch_are_those_of_a_sample_and_every_row_is_judged(run: Run) -> None:
    found = run(scenarios.of_a_sample).expect()
    assert same(found["found"], found["expected"]) and "k3_kl_error" in found["found"]
    assert found["drawn"] < 6 and found["found"]["mean_tokens"] < found["found"]["tokens"]
    (fault,) = found["bad"]
    assert fault[0] == "old_logprobs" and fault[1].startswith(f"rollout {found['left']} of step 4, token 0")


def test_rows_with_values_that_are_no_logprobs_are_bad_and_left_out(run: Run) -> None:
    found = run(scenarios.unfit).expect()
    for case, reason, message in (
        ("sampled", "rollout_logprobs", "rollout prompt_5_0 of step 4, token 9: the engine's log-probability is nan."),
        (
            "infinite",
            "rollout_logprobs",
            "rollout prompt_2_0 of step 4, token 0: the engine's log-probability is -inf.",
        ),
        ("trainer's", "old_logprobs", "rollout prompt_6_0 of step 4, token 11: the trainer's log-probability is inf."),
    ):
        assert found[case] == [[reason, message]]
        assert found[f"{case} left out"] and found[f"{case} lengths"] == 5
    assert found["a tool's"] == found["filled up"] == []
    assert found["a tool's lengths"] == found["filled up lengths"] == 6
    assert "rollout prompt_5_0 of step 4 has 9 rollout_log_probs and 30 places" in found["short"]
    assert "calculate_log_probs=True" in found["absent rollout_log_probs"]
    for name, advice in (("old_log_probs", "worker of your actor"), ("ref_log_prob", "use_kl_loss=False")):
        missing = found[f"absent {name}"]
        assert f"prompt_0_0 to prompt_2_0 of step 4 have no {name}" in missing and advice in missing


def test_rows_are_kept_as_they_were_sampled_and_scored(run: Run) -> None:
    found = run(scenarios.evidence).expect()
    scored, corrected, unscored = (found[name] for name in ("scored", "corrected", "unscored"))
    for lines in found.values():
        # Without the row that verl has filled the batch up with; the row that the message names comes first.
        assert sorted(line["kept"]["row"] for line in lines) == list(range(6)) and lines[0]["kept"]["row"] == 3
        assert [line["kept"]["sampled_after"] for line in lines].count(2) == 1 and {line["step"] for line in lines} == {
            3
        }
    assert scored[1]["kept"]["row"] == 4 and len(scored[1]["trainer_logprobs"]) == 30  # the row with the largest gap
    assert scored[0]["prompt_ids"] == [1, 2, 3, 4, 5, 6] and scored[0]["response_ids"] == [20, 21, 22]
    assert not any("routes" in line for line in scored + unscored)
    assert not any("trainer_logprobs" in line for line in unscored)
    # What verl's correction rejects still counts as sampled.
    masks = {line["kept"]["row"]: line["response_mask"] for line in corrected}
    assert masks == {line["kept"]["row"]: line["response_mask"] for line in scored} and any(masks[0])
    assert {(line["routes"]["start"], tuple(line["routes"]["layers"])) for line in corrected} == {(0, (1, 3))}
    assert [line["routes"]["shape"][0] for line in corrected] == [
        len(line["prompt_ids"]) + len(line["response_ids"]) - 1 for line in corrected
    ]


def test_each_token_is_measured_by_its_version(run: Run) -> None:
    found = run(scenarios.by_version).expect()
    # Segments that begin behind another prompt are of a later turn, and say nothing of what is before it.
    assert found["segments"] == [[[6, 0], [7, 2]], [[7, 0]], [[None, 0]]]
    assert found["first_turn"] == [[None, 0]]  # as a loop keeps it that asks for each turn under another id
    # A stamp that contradicts what the client noted proves nothing of the tokens of older turns.
    assert found["last_stamps"] == found["last_segments"] == [[None, 0]]
    assert found["outputs"] == [[[6, 0]], [[7, 0]]]
    assert found["of_routes"] == [[6, 7], [7, 7], None]
    of_batch = found["batch"]
    assert of_batch["numerics/tokens"] == 5 and of_batch["staleness_max"] == 1
    assert of_batch["numerics/logp_abs_diff_mean"] == pytest.approx((2 * 1.0 + 3 * 0.5) / 5)
    assert of_batch["unknown_version_frac"] == pytest.approx(2 / 9)
    assert (of_batch["same_version_frac"], of_batch["mixed_routes_frac"]) == (pytest.approx(5 / 9), 0)
    # The first response's end is of this version, and what is before it was routed by older weights.
    replayed = found["replayed"]
    assert replayed["numerics/tokens"] == 3 and replayed["numerics/logp_abs_diff_mean"] == pytest.approx(0.5)
    assert (replayed["same_version_frac"], replayed["mixed_routes_frac"]) == (
        pytest.approx(5 / 9),
        pytest.approx(2 / 9),
    )
    # An agent loop that hands on no extra_fields says nothing of versions.
    assert found["nobody knows"]["unknown_version_frac"] == 1
    assert found["ahead"].startswith(
        "RecordError: a token was sampled by weights of version 7, and the batch is scored"
    )


def test_kl_and_baseline_do_not_depend_on_chunks(run: Run) -> None:
    found = run(scenarios.kl).expect()
    whole = found["whole"]
    for case in found.values():
        assert case["error"] < 1e-9 and case["lengths"] == whole["lengths"]
        assert whole["baseline"] == [pytest.approx(row, rel=1e-6) for row in case["baseline"]]
        assert case["fetched"] == len(case["baseline"])  # one loop measures gap, reference, KL and baseline
    assert any(value for row in whole["baseline"] for value in row)


def test_what_a_correction_discards_is_counted(run: Run) -> None:
    plain, weighted = run(scenarios.discarded).expect()
    sampled = plain[1]
    assert sampled[4] == 0 and all(count for row, count in enumerate(sampled) if row != 4)
    assert plain[0] == [0 if row == 1 else count for row, count in enumerate(sampled)]
    assert weighted == [[plain[0][0] - 3, *plain[0][1:]], sampled]


def test_groups_stay_whole_and_come_once(run: Run) -> None:
    found = run(scenarios.grouping).expect()
    keys, groups = found["keys"], found["groups"]
    assert sorted(key for group in groups for key in group) == sorted(keys)
    # Four answers to the first prompt, of which one came late; a session of several outputs is in no group.
    assert len(groups[0]) == 4 and ["turns_0_0"] in groups and ["turns_0_1"] in groups and ["turns_1_0"] in groups
    assert [group for chunk in found["chunks"] for group in chunk] == groups
    sizes = [(len(chunk), sum(map(len, chunk))) for chunk in found["chunks"]]
    assert all(rows <= 64 or count == 1 for count, rows in sizes) and max(rows for _, rows in sizes) == 80


def test_verls_loggers_keep_a_users_metric_with_our_prefix_in_its_name(run: Run) -> None:
    names = [
        "reward/mismatch/format",
        "rewards/mismatch/routing/layer_3_set_mismatch",
        "val-core/token_mismatch/acc/mean@8",
    ]
    found = run(scenarios.users_own_metrics, names=names).expect()
    assert [name for name in found if not name.startswith("mismatch/")] == names
    ours = [*names, "mismatch/seq_kl", "mismatch/k3_kl", "mismatch/routing/layer_3_set_mismatch"]
    assert (
        sorted(["mismatch/k3_kl", "mismatch/alarms_raised", *names])
        == run(scenarios.users_own_metrics, names=ours).expect()
    )


def test_rows_are_held_against_what_the_engine_sampled_and_by_which_settings(run: Run) -> None:
    found = run(scenarios.as_sampled).expect()
    nothing = "nothing was refused"
    for case in ("as it was", "masked", "nobody knows"):
        assert found[case] == [nothing, []], case
    settings, ((reason, message),) = found["another token"]
    assert (settings, reason) == (nothing, "tokens")
    assert message.startswith("rollout prompt_1_0 of step 4, token 0: the tokens to be trained on are not")
    # Three of nine tokens are not those that the request sampled; a row that nobody noted is not counted.
    assert found["another token, metrics"] == {"forked_frac": 1 / 3, "misplaced_frac": 3 / 9}
    for case in ("as it was", "masked", "nobody knows", "moved"):
        assert found[f"{case}, metrics"] == {"forked_frac": 0.0, "misplaced_frac": 0.0}, case
    settings, tokens = found["moved"]
    assert tokens == []
    assert settings.startswith(
        "RecordError: rollout prompt_2_0 of step 4 was sampled with temperature=0.7, and the trainer"
    )
    assert "actor_rollout_ref.rollout.temperature=1" in settings


def test_what_is_known_of_sampling_masks_is_fetched_in_chunks(run: Run) -> None:
    # What tools put into the same field may be large, and the batch has thousands of rows.
    found = run(scenarios.masks_fetched).expect()
    assert found["most"] == found["chunk"]
    assert found["bad"] == {"prompt_130_0": "rollout prompt_130_0 of step 4 has no sampling masks. it was lost."}
