"""The KL has the same names in the logs of TRL and of verl, and the same saved state; TRL logs what a correction does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mismatch_ext.correction import LOGGED
from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.conformance import scenarios_names as scenarios
    from tests.peers.trl import scenarios_correction as in_trl
else:
    scenarios = named("tests.peers.conformance.scenarios_names")
    in_trl = named("tests.peers.trl.scenarios_correction")

pytestmark = pytest.mark.engine
HOSTS = ("TRL", "verl")
# TRL has no setting for a veto beside weights and rejection, so that all of it is this package's.
CORRECTION = {"preset": "decoupled_geo_rs_token_tis", "veto": 1e-4}
EXPECTED = set(LOGGED) - {"rollout_is_oob_ratio", "rollout_is_batch_norm_factor"}


@pytest.fixture(scope="module", params=HOSTS)
def kl(request: pytest.FixtureRequest, run: Run, dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what two steps of a host logged of the KL, and what it saves."""
    if request.param == "TRL":
        return run(scenarios.kl_in_trl, model=dense, out=tmp_path_factory.mktemp("kl")).expect()
    return run(scenarios.kl_in_verl).expect()


@pytest.fixture(scope="module")
def weights(run: Run, dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what TRL logged of weights and rejection."""
    # The off-policy mask is TRL's own, beside weights that are not.
    block = {"correction": {**CORRECTION, "off_policy_threshold": 0.5}}
    out = tmp_path_factory.mktemp("weights")
    given = {"model": dense, "out": out, "block": block, "vllm_importance_sampling_mode": "sequence_mask"}
    return run(in_trl.trained, **given).expect()["rollout_metrics"]


def test_the_kl_is_logged_under_the_same_names(kl: Any) -> None:
    first, second = kl["steps"]
    assert set(first) == set(second) == {"mismatch/kl_ref_k1", "mismatch/kl_ref_k3", "mismatch/kl_coef"}
    assert first["mismatch/kl_ref_k3"] > 1e-4
    # TRL's own name for it stays.
    assert kl.get("own", first["mismatch/kl_ref_k3"]) == first["mismatch/kl_ref_k3"]
    # The first batch has the coefficient to start with; its error is at its clip of 0.2, whichever way the sample has it.
    assert first["mismatch/kl_coef"] == 0.1
    assert abs(math.log(second["mismatch/kl_coef"] / 0.1)) == pytest.approx(0.03)


def test_weights_and_rejection_are_logged(weights: Any) -> None:
    assert {f"mismatch/{name}" for name in EXPECTED} <= set(weights)
    assert all(name.startswith("mismatch/") for name in weights), sorted(weights)
    assert 0 < weights["mismatch/rollout_is_min"] < 1 < weights["mismatch/rollout_is_max"]
    assert 0.9 < weights["mismatch/rollout_is_mean"] < 1.1
    assert 0 < weights["mismatch/rollout_rs_masked_fraction"] <= 1
