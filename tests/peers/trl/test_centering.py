"""Score centering in the real TRL with vLLM: what it adds to the gradient, what it refuses, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.peers.scenarios import Run, named
from tests.peers.trl.ranks import launch

if TYPE_CHECKING:
    from tests.peers.trl import scenarios_centering as scenarios
    from tests.peers.trl import scenarios_centering_ranks as of_ranks
else:
    of_ranks = named("tests.peers.trl.scenarios_centering_ranks")
    scenarios = named("tests.peers.trl.scenarios_centering")

pytestmark = [pytest.mark.engine, pytest.mark.numeric]


def test_the_term_is_the_formula_in_every_loss(run: Run, untied: Path, tmp_path: Path) -> None:
    found = run(scenarios.formula, model=untied, out=tmp_path, timeout=600).expect()
    cases = found["cases"]
    assert len(cases) == 7 * 3 * 2
    wrong = [case for case in cases if not case["error"] < 1e-6]
    assert not wrong, wrong[:3]
    # The term is no rounding next to the rest of the gradient, so that the comparison can fail.
    assert min(case["effect"] for case in cases) > 1e-3
    assert min(case["bias"] for case in cases) > 1e-3
    assert max(found["differences"]) < 1e-6, found["differences"]

    refused = found["refused"]
    for name, words in {
        "vespo": "centering with loss_type='vespo'",
        "sequence": "importance_sampling_level='sequence'",
        "iterations": "num_iterations=2",
        "stale": "steps_per_generation=2",
        "entropy": "top_entropy_quantile=0.5",
        "opsm": "off_policy_mask_threshold=0.5",
    }.items():
        assert words in refused[name], (name, refused.get(name))


def test_steps_with_it_without_it_and_with_its_measurement_alone(run: Run, dense: Path, tmp_path: Path) -> None:
    found = run(scenarios.trainings, model=dense, out=tmp_path).expect()
    # Measuring changes no parameter, bit for bit, and centering does.
    assert found["without"]["parameters"] == found["measured"]["parameters"]
    # Without a correction of ours, TRL's own stays.
    assert found["stock"]["parameters"] == found["measured/stock"]["parameters"]
    assert found["without"]["parameters"] != found["centered"]["parameters"]
    for name in ("measured/stock", "measured", "centered"):
        assert all(step["mismatch/sampler_bias"] > 0 for step in found[name]["history"]), name
    assert not any("mismatch/sampler_bias" in step for step in found["without"]["history"])
    assert found["max_logprobs"] == 6
    heads = found["heads"]
    assert heads["equal"] and set(heads["bytes"]) == {6 * 8}
    assert set(heads["kept/width"]) == set(heads["listed/width"]) == {1}


def test_a_step_of_two_ranks_is_that_of_one_process(dense: Path, tmp_path: Path) -> None:
    first, second = launch("ddp", of_ranks.step, tmp_path, model=dense).expect()
    assert first["rows"] == [8, 8]
    for rank in (first, second):
        # Float32 against the formula by hand; without the term, the step is another one.
        assert rank["error"] < 1e-3 < 1e-2 < rank["effect"], rank
    # Of all tokens of both ranks, and not a mean of two means.
    bias, tokens = (sum(column) for column in zip(first["tokens"][:2], second["tokens"][:2], strict=True))
    assert first["tokens"][1] != second["tokens"][1]
    assert first["logged"] == second["logged"] == pytest.approx(bias / tokens, rel=1e-6)
