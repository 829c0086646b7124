"""What `--quick` samples, and what the doctor says while it works."""

from __future__ import annotations

from io import StringIO

import pytest
from mismatch_ext.adapters.doctor.examining import LEAST_QUICK, QUICK_ROWS, size_quickly
from mismatch_ext.adapters.doctor.progress import CAUSES, QUICK, Progress
from rich.console import Console


@pytest.mark.parametrize(
    ("vocabulary", "shortened", "wanted"),
    [
        (64, True, (256, 128)),  # what every look samples
        (49_152, True, (QUICK_ROWS, 85)),
        (49_152, False, (QUICK_ROWS, 128)),  # who asks for a length gets it
        (262_144, True, (QUICK_ROWS, LEAST_QUICK // QUICK_ROWS)),
        (None, True, (QUICK_ROWS, LEAST_QUICK // QUICK_ROWS)),
    ],
)
def test_a_quick_look_samples_what_its_vocabulary_affords(
    vocabulary: int | None, shortened: bool, wanted: tuple[int, int]
) -> None:
    assert size_quickly(vocabulary, 128, shortened=shortened) == wanted


def test_short_responses_are_not_lengthened() -> None:
    responses, longest = size_quickly(49_152, 16, shortened=True)
    assert longest == 16 and QUICK_ROWS < responses <= 256


def test_a_line_that_stays_is_printed_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    with Progress("doctor", QUICK) as rung:
        rung("engine")
        rung.say("first look, 8 tokens: mean 1.0e-05 nats")
        rung("engine again")  # within the seconds that lie between two lines of a log
        assert set(rung.ended()) == {"engine", "engine again"}
    said = capfd.readouterr().err
    assert "first look, 8 tokens: mean 1.0e-05 nats\n" in said and "engine again" not in said


def test_a_terminal_gets_a_bar_with_the_time_to_go_and_a_pipe_none() -> None:
    written = StringIO()
    with Progress("doctor", QUICK, console=Console(file=written, force_terminal=True, width=100)) as rung:
        done = []
        for name in ("engine", "trainer", "temperature", "top_p", "blocks", ""):
            rung(name)
            done.append(rung._done)
        rung._bar.refresh() if rung._bar is not None else None
    assert done == sorted(done) and done[0] == 0 and done[-1] == sum(QUICK.values())
    causes = [rung._done_by(f"cause {number}") for number in range(2)]
    assert causes == [done[-1]] * 2, "nothing is undone"
    assert (
        0 < done[4] - done[3] <= QUICK[CAUSES]
        and "s to go" in written.getvalue()
        and "doctor: blocks" in written.getvalue()
    )
    piped = Progress("doctor", QUICK, console=Console(file=StringIO()))
    assert piped._bar is None
