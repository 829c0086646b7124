"""What `--quick` samples, and what the doctor says while it works."""

from __future__ import annotations

import pytest
from mismatch_ext.adapters.doctor.examining import LEAST_QUICK, QUICK_ROWS, size_quickly


@pytest.mark.parametrize(
    ("vocabulary", "shortened", "wanted"),
    [
        (64, True, (256, 128)),  # what every look samples
        (49_152, True, (QUICK_ROWS, 85)),
        (49_152, False, (QUICK_ROWS, 128)),  # who asks for a length gets it
        (None, True, (QUICK_ROWS, LEAST_QUICK // QUICK_ROWS)),
    ],
)
def test_a_quick_look_samples_what_its_vocabulary_affords(
    vocabulary: int | None, shortened: bool, wanted: tuple[int, int]
) -> None:
    assert size_quickly(vocabulary, 128, shortened=shortened) == wanted
