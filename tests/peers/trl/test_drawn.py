"""TRL's own settings vary: every section acts beside whatever was drawn, or the draw is refused by name before the first step.

`make nightly` draws anew and prints the seed; MISMATCH_SEED=<seed> draws the same again.
"""

from __future__ import annotations

import math
import os
import random
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mismatch_ext.log_reading import read_run
from tests.oracle import expect_float32
from tests.peers.scenarios import Run, named
from tests.peers.trl.drawn import Draw, drawn

if TYPE_CHECKING:
    from tests.peers.trl import scenarios_drawn as scenarios
else:
    scenarios = named("tests.peers.trl.scenarios_drawn")

pytestmark = [pytest.mark.engine, pytest.mark.numeric]
SEED = 5
COUNT = 6
"""Runs of a fresh seed."""
Check = Callable[[Draw], None]


def accepted(seed: int) -> Iterator[Draw]:
    """Draw runs that nothing refuses."""
    rng = random.Random(seed)
    while True:
        draw = drawn(rng)
        if not draw.refusals:
            yield draw


@pytest.fixture
def check(run: Run, moe: Path, tmp_path: Path) -> Check:
    """Return a function that trains with a draw, resumes, and compares with TRL alone."""

    def one(draw: Draw) -> None:
        host = {**draw.host, "max_steps": draw.steps}
        whole = run(scenarios.train, model=moe, out=tmp_path / "whole", block=draw.block, host=host).expect()
        check_sections(draw, whole, tmp_path / "whole")
        if draw.of_trl is not None:
            # With replay: a pass of weights that have moved on would choose experts of its own.
            block = {name: draw.block[name] for name in ("precision", "routing")}
            alone = {**draw.of_trl, "max_steps": draw.steps}
            check_numbers(
                whole, run(scenarios.train, model=moe, out=tmp_path / "trl", block=block, host=alone).expect()
            )
        checkpoint = tmp_path / f"whole/checkpoint-{draw.resume_at}"
        resumed = run(
            scenarios.train, model=moe, out=tmp_path / "resumed", block=draw.block, host=host, resume=checkpoint
        ).expect()
        assert len(resumed["history"]) == draw.steps and resumed["verdict"] == "in_sync"
        # TRL keeps no rollouts in a checkpoint: between two generations it samples again.
        if draw.resume_at % draw.period == 0:
            assert resumed["history"] == whole["history"]
            assert resumed["parameters"] == whole["parameters"]

    return one


def check_sections(draw: Draw, whole: dict[str, Any], out: Path) -> None:
    """Check that each section did its part in each step, and that both sides agree in float32."""
    history = whole["history"]
    assert len(history) == draw.steps and whole["verdict"] == "in_sync"
    assert all(math.isfinite(value) for entry in history for value in entry.values())
    generated = [entry for entry in history if "mismatch/logp_abs_diff_mean" in entry]
    expect_float32(generated, whole["float32_errors"])
    differing = [entry["mismatch/routing/set_mismatch_frac"] for entry in history]
    # The weights that a rollout is of are those of its passes in the first step, and in every step that generates anew.
    assert differing[0] == 0.0 and (not draw.on_policy or not any(differing)), differing
    assert all("mismatch/native/k3_kl" in entry for entry in generated)
    assert [entry["mismatch/lr_multiplier"] for entry in history] == [0.5 ** (step // 2) for step in range(draw.steps)]
    data = read_run(out / "mismatch")
    assert [record.step for record in data.steps] == list(range(1, draw.steps + 1))
    assert set(data.header["config"]) >= set(draw.block)


def check_numbers(ours: dict[str, Any], alone: dict[str, Any]) -> None:
    """Compare with TRL's own settings for the same, as long as the rates are the same: the third step is taken with half."""
    for step, (mine, trls) in enumerate(zip(ours["history"][:3], alone["history"], strict=False)):
        # A step that generates nothing logs no rewards.
        names = {"loss", "grad_norm", "reward", "completions/mean_length"} & trls.keys()
        for name in names:
            assert mine[name] == pytest.approx(trls[name], rel=1e-3, abs=1e-5), (step, name)


@pytest.mark.parametrize("number", range(2))
def test_every_section_acts_and_trls_numbers_are_its_own(check: Check, number: int) -> None:
    draws = accepted(SEED)
    draw = [next(draws) for _ in range(number + 1)][-1]
    print(draw)
    check(draw)


def test_draws_are_refused_by_name_or_taken(run: Run, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    draws = [drawn(rng) for _ in range(150)]
    given = [{"block": draw.block, "host": draw.host} for draw in draws]
    found = run(scenarios.refused, out=tmp_path, draws=given).expect()
    for draw, said in zip(draws, found, strict=True):
        assert any(reason in said for reason in draw.refusals) if draw.refusals else said == "", (draw, said)
    reasons = {reason for draw in draws for reason in draw.refusals}
    assert len(reasons) == 4 and "" in found


@pytest.fixture(scope="module")
def fresh_seed() -> int:
    """Return the seed of MISMATCH_SEED, or a new one."""
    return int(os.environ.get("MISMATCH_SEED") or secrets.randbits(32))


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(COUNT))
def test_fresh_draws(fresh_seed: int, check: Check, number: int) -> None:
    draws = accepted(fresh_seed)
    draw = [next(draws) for _ in range(number + 1)][-1]
    print(f"MISMATCH_SEED={fresh_seed}, draw {number}: {draw}")
    check(draw)
