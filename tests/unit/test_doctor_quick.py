"""What `--quick` samples, and what the doctor says while it works."""

from __future__ import annotations

import pytest
from mismatch_ext.adapters.doctor.examining import LEAST_QUICK, QUICK_ROWS, size_quickly
from mismatch_ext.adapters.doctor.progress import Progress


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
    with Progress("doctor") as rung:
        rung("engine")
        rung.say("first look, 8 tokens: mean 1.0e-05 nats")
        rung("engine again")  # within the seconds that lie between two lines of a log
        assert set(rung.ended()) == {"engine", "engine again"}
    said = capfd.readouterr().err
    assert "first look, 8 tokens: mean 1.0e-05 nats\n" in said and "engine again" not in said
