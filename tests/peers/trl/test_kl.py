"""The `kl` section in the real TRL: its own terms, schedules, adaptive coefficient."""

from __future__ import annotations

from pathlib import Path

import pytest

from mismatch_ext.versions import installed
from tests.peers.kl_terms import assert_documented
from tests.peers.scenarios import Run, named

scenarios = named("tests.peers.trl.scenarios_kl")
scenarios_kl_terms = named("tests.peers.trl.scenarios_kl_terms")


pytestmark = pytest.mark.engine


def test_trls_own_terms_are_those_of_the_page(run: Run, dense: Path, tmp_path: Path) -> None:
    found = run(scenarios_kl_terms.terms, model=str(dense), out=str(tmp_path)).expect()
    assert_documented(found, "TRL", str(installed("trl")))
    by = {(row["setting"], row["sampling"]): row for row in found}
    default = "use_bias_correction_kl=True"
    assert {setting for setting, _ in by if by[setting, "on-policy"]["default"]} == {default}
    # The default is the per-token reverse KL, on-policy and off; without the ratio it is the forward one.
    assert by[default, "on-policy"]["regularizes"] == "KL(pi||ref) of tokens, prefixes of pi"
    assert by[default, "off-policy"]["regularizes"] == "KL(pi||ref) of tokens, prefixes of mu"
    plain = by["use_bias_correction_kl=False", "on-policy"]
    assert plain["regularizes"] == "KL(ref||pi) of tokens, prefixes of pi"
    assert 0.2 < by[default, "on-policy"]["responses"] < plain["responses"]


def test_a_coefficient_that_is_scheduled_as_in_trl_is_the_one_of_each_step(
    run: Run, dense: Path, tmp_path: Path
) -> None:
    run(scenarios.scheduled, model=dense, out=tmp_path).expect()


def test_a_controller_moves_once_a_step_however_often_a_step_generates(run: Run, dense: Path, tmp_path: Path) -> None:
    run(scenarios.refilled, model=dense, out=tmp_path).expect()


def test_adaptive_coefficient_resumes_where_it_was(run: Run, dense: Path, tmp_path: Path) -> None:
    run(scenarios.adaptive, model=dense, out=tmp_path).expect()
