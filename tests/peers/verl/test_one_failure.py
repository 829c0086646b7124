"""What one failure does to the rest of a run with verl: an error of one rank's pass stays that rank's."""

from __future__ import annotations

from pathlib import Path

from tests.peers.scenarios import Run, named

failing = named("tests.peers.verl.in_process.scenarios_one_failure")


def test_a_pass_that_fails_on_one_rank_fails_there_and_meets_no_other_rank(run: Run, moe: Path) -> None:
    first, second = run(failing.failing_pass_on_two, model=moe).expect()
    assert first == {"said": "out of memory", "shared": 2000.0}
    assert second == {"said": "the other rank's pass failed", "shared": 2000.0}


def test_a_nan_makes_the_loss_no_number_and_raises_nothing(run: Run) -> None:
    found = run(failing.losses_of_a_nan).expect()
    for name in ("kl", "opsm"):
        sound, broken = found[f"{name} sound"], found[f"{name} nan"]
        assert sound["finite"] and sound["slopes"]
        assert not broken["finite"]
        assert broken["metrics"] == sound["metrics"]


def test_the_published_workaround_for_saved_weights_works(run: Run) -> None:
    assert run(failing.saved_weights).expect() == 0.0


def test_requests_with_penalties_or_min_p_are_found(run: Run) -> None:
    neutral, *found, implied = run(failing.settings_of_requests).expect()
    assert neutral == "nothing was refused"
    names = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "presence_penalty")
    for name, said in zip(names, found, strict=True):
        assert f"was sampled with {name}=" in said
    assert "was sampled with repetition_penalty=1.1" in implied


def test_an_alarm_reads_the_gaps_of_rows_as_their_lists_say(run: Run) -> None:
    assert run(failing.sizes_of_rows).expect() == {"equal": True, "tokens": True}


def test_the_first_local_update_that_trains_leads_the_rate(run: Run) -> None:
    assert run(failing.led_rates).expect() == [0, 1, 0, 1, 0, 0]
