"""Numerics and drift in verl's own asynchronous trainer, against the truth: every token scored by the weights that sampled it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mismatch_ext.metrics import Interval, bootstrap_ratio
from tests.models import tiny_model
from tests.peers.verl.cpu.own_versions import DUMP, FAULT_FROM
from tests.peers.verl.main_ppo import dtypes, run_verl
from tests.peers.verl.modes import COLOCATE

MODULES = "tests.peers.verl.cpu.platform,tests.peers.verl.cpu.own_versions"
STEPS, FAULTY = 5, 4
"""Steps of the run, and the first whose trainer scores at a temperature of 0.98."""
ROUNDING = 1e-5
"""Mean gap that rounding in float32 leaves at most."""
SOURCES = ("batch", "buffer", "kept")


@dataclass(frozen=True)
class Truth:
    """One batch: mean |Δlogp| per token of numerics and of drift, over all tokens, with the intervals of rows drawn anew."""

    numerics: Interval
    drift: Interval
    stale: int
    segments: int


def truth(dump: dict[str, Tensor]) -> Truth:
    mask, tokens = dump["mask"], dump["mask"].sum(1).double()
    assert bool((dump["versions"][mask] >= 0).all())  # the client noted every token

    def mean(values: Tensor) -> Interval:
        return bootstrap_ratio((values.abs() * mask).sum(1).double().numpy(), tokens.numpy(), level=0.999)

    mixed = [len(set(row[own].tolist())) for row, own in zip(dump["versions"], mask, strict=True)]
    return Truth(
        numerics=mean(dump["rollout"] - dump["own"]),
        drift=mean(dump["own"] - dump["old"]),
        stale=int((mask & (dump["versions"] != dump["now"])).sum()),
        segments=max(mixed),
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, float]], list[Truth]]:
    """Return what a float32 run logged of each step, and the truth."""
    work = tmp_path_factory.mktemp("drift")
    (work / "dumps").mkdir()
    env = {"VERL_USE_EXTERNAL_MODULES": MODULES, DUMP: str(work / "dumps"), FAULT_FROM: str(FAULTY - 1)}
    block = "+mismatch.monitor={keep_weights:2,numerics_tokens:64}"
    overrides = [*COLOCATE, *dtypes("float32"), block, f"trainer.total_training_steps={STEPS}"]
    run = run_verl(work / "run", overrides, model=tiny_model("dense", work / "model"), plugin=True, env=env)
    steps = run.expect(STEPS)
    dumps = [torch.load(work / f"dumps/{step}.pt", weights_only=True) for step in range(1, STEPS + 1)]
    return steps, [truth(dump) for dump in dumps]


def test_every_source_gives_the_truth(found: tuple[list[dict[str, float]], list[Truth]]) -> None:
    used = set()
    for step, known in zip(*found, strict=True):
        for source in SOURCES:
            if step[f"mismatch/numerics/{source}/tokens"]:
                used.add(source)
                mean = step[f"mismatch/numerics/{source}/logp_abs_diff_mean"]
                # Of other tokens than all: in float32 both are rounding, with the fault both are of its size.
                low, high = known.numerics.low, known.numerics.high
                assert mean <= ROUNDING and high <= ROUNDING or low / 2 <= mean <= high * 2, (source, step, known)
        if not any(step[f"mismatch/numerics/{source}/tokens"] for source in SOURCES):
            assert "mismatch/numerics/logp_abs_diff_mean" not in step
    assert {"batch", "kept"} <= used
    assert max(known.segments for known in found[1]) > 1, "no answer was resumed under other weights"


def test_drift_is_no_numerics_and_a_fault_of_numerics_is_no_drift(
    found: tuple[list[dict[str, float]], list[Truth]],
) -> None:
    before, after = [], []
    for number, (step, known) in enumerate(zip(*found, strict=True), start=1):
        numerics = step.get("mismatch/numerics/logp_abs_diff_mean")
        if number < FAULTY:
            # What training did is in the gap, and rounding is all of numerics.
            assert numerics is None or numerics <= ROUNDING
            if known.stale:
                assert step["mismatch/stale/logp_abs_diff_mean"] > 100 * ROUNDING
        elif numerics is not None:
            after.append(numerics)
        if "mismatch/drift/logp_abs_diff_mean" in step:
            drift = step["mismatch/drift/logp_abs_diff_mean"]
            assert drift > 100 * ROUNDING
            before.append((number, drift, known.drift.value))
    assert after and min(after) > 100 * ROUNDING
    # Drift is that of the weights, whatever temperature both of its sides are scored at.
    assert any(number >= FAULTY for number, _, _ in before), before
