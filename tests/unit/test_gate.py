"""The figures of a gate, their limits, and its page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mismatch_ext.doctor.evidence import Block
from mismatch_ext.doctor.gate import Gate, measured
from tests.unit.test_doctor import drawn, drift

BLOCKS = [Block(layer=at, kind="mlp", error=1e-2 if at == 2 else 1e-3, own=1e-3) for at in range(4)]


def gate(size: float = 0.0, *, flips: tuple[float, float] | None = None, blocks: list[Block] | None = None) -> Gate:
    sample, scores = drawn(extra=lambda z: drift(z, size)) if size else drawn()
    batch = sample.row % 20
    return measured(sample, replace(scores, flips=flips), batch, blocks=blocks or [])


def failed(found: Gate) -> list[str]:
    return list(found.data()["failed"])


def test_two_sides_that_only_round_pass_on_a_short_page() -> None:
    found = gate(flips=(0.012, 0.01), blocks=BLOCKS[:2])
    assert found.passes and failed(found) == [], found.page()
    page = found.page().splitlines()
    assert len(page) <= 60 and "passed" in page[0]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"size": 0.3}, "error of the engine in units of rounding"),
        ({"flips": (0.03, 0.01)}, "experts that differ, share of tokens and layers"),
        ({"blocks": BLOCKS}, "blocks that differ, of 4"),
    ],
)
def test_what_rounding_does_not_explain_fails_by_name(given: dict[str, object], name: str) -> None:
    found = gate(**given)  # type: ignore[arg-type]
    assert not found.passes and name in failed(found), found.page()


def test_the_limits_of_the_frameworks_are_kept_and_the_block_is_told() -> None:
    found = gate(3.0, blocks=BLOCKS)
    assert {"k3 (nats per token)", "mean exp(abs difference)"} < set(failed(found)), found.page()
    assert "first block that differs: layer 2, mlp (10.0 of rounding's)" in found.page()
