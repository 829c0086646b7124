"""TRL's AsyncGRPOTrainer with a block against a real `vllm serve`: the weights of each token, and faults that are named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.peers.engines.vllm_server import serving
from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.trl import scenarios_async as scenarios
else:
    scenarios = named("tests.peers.trl.scenarios_async")

pytestmark = [pytest.mark.engine, pytest.mark.numeric]


def serve(model: Path, folder: Path, *flags: str) -> Any:
    """Run a server whose weights come over HTTP."""
    asked = ["--logprobs-mode", "processed_logprobs", "--weight-transfer-config", '{"backend": "mismatch_http"}']
    return serving(model, folder, *asked, *flags, development=True)


@pytest.fixture(scope="module")
def server(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve(dense, tmp_path_factory.mktemp("server"), "--dtype", "float32") as found:
        yield found


def test_each_token_has_its_weights_and_what_both_sides_hold_is_the_same(
    run: Run, dense: Path, server: str, tmp_path: Path
) -> None:
    block = {"precision": {"dtype": "float32"}, "correction": {"preset": "token_truncate"}}
    result = run(scenarios.train, model=dense, out=tmp_path, url=server, block=block).expect()
    # Every token against the weights of its version, on both sides of the updates that have cut it.
    truth = result["truth"]
    assert truth["cuts"] > 0
    assert truth["mean"] < 1e-5 and truth["largest"] < 1e-3
    assert truth["beside cuts"] < 1e-5 < 0.01 < truth["beside cuts, by the other side's"]
    history = result["history"]
    for step, again in zip(history, truth["steps"], strict=False):  # the last are those that no step has learned from
        # TRL's pass over the packed tree finds what scoring each rollout alone does.
        assert step["mismatch/logp_abs_diff_mean"] == pytest.approx(again["gap"], rel=1e-3, abs=1e-5)
        # What both sides hold agrees, in decoding and in the weight check; what is older has drifted.
        assert step["mismatch/numerics/logp_abs_diff_mean"] < 1e-5
        assert step["mismatch/weight_sync_gap"] < 1e-5
    assert history[0]["mismatch/same_version_frac"] == 1.0
    assert all(step["mismatch/stale/logp_abs_diff_mean"] > 1e-3 for step in history[1:])
    assert all(step["mismatch/staleness_max"] <= number for number, step in enumerate(history))
    assert all(step["mismatch/unknown_version_frac"] == 0 for step in history)
    assert all(step["ratio"] == 1.0 for step in history)  # TRL's own: pi_old is the policy of the pass
    assert result["verdicts"] == ["unchanged"] + ["in_sync"] * len(history)


@pytest.mark.nightly
def test_faults_are_named(run: Run, dense: Path, server: str, tmp_path: Path) -> None:
    found = run(scenarios.faults, model=dense, out=tmp_path, url=server).expect()
    for fault, words in {
        "precision": ["EngineError", "--dtype float16", "it computes in float32"],
        "nothing": ["WeightSyncError"],
        "other trainer": ["EngineError", "another trainer"],
    }.items():
        assert all(word in found[fault] for word in words), (fault, found[fault])
