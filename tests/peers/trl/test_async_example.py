"""TRL's AsyncGRPO by the example, in float16: what it logs of drift and numerics, against scoring its tokens again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.models import tiny_model
from tests.peers.scenarios import Forks, named
from tests.peers.trl.test_async_server import serve
from tests.rendezvous import rendezvous

if TYPE_CHECKING:
    from tests.peers.trl import scenarios_async as scenarios
else:
    scenarios = named("tests.peers.trl.scenarios_async")

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(900)]


def test_drift_and_numerics_of_the_example_are_what_scoring_again_says(tmp_path: Path) -> None:
    """Drift and numerics that `examples/trl_async.py` logs are what scoring its tokens again says."""
    dense = tiny_model("dense", tmp_path / "model")
    forks, variables = Forks(), {"HF_HUB_OFFLINE": "1", **rendezvous()}
    try:
        with serve(dense, tmp_path, "--dtype", "float16") as url:
            payload = {"model": dense, "out": tmp_path, "url": url}
            result = forks.run(scenarios.example, payload, variables, 240).expect()
    finally:
        forks.close()
    assert result["steps"] == 3 and result["engine"]["model_dtype"] == "float16"
    assert result["scaler"]["mismatch_ext"]["overflow_steps"] == 0 and result["scaler"]["scale"] >= 1024
    history, truth = result["history"], result["truth"]
    if truth["cuts"]:  # an update came while an answer was sampled, which hangs on the machine
        assert truth["beside cuts"] < truth["beside cuts, by the other side's"] / 10
    for number, (step, again) in enumerate(zip(history, truth["steps"], strict=False)):
        # Of other tokens, which the same weights have sampled; drift is larger by two orders.
        numerics = step["mismatch/numerics/logp_abs_diff_mean"]
        assert again["numerics"] / 3 < numerics < again["numerics"] * 3
        if number:
            # |rollout - train(w)| and |train(v) - train(w)| differ by numerics at most, token by token.
            stale = step["mismatch/stale/logp_abs_diff_mean"]
            assert stale == pytest.approx(again["drift"], abs=3 * again["numerics"]) and stale > 10 * numerics
