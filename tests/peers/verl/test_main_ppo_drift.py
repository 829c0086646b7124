"""Numerics and drift in verl's own asynchronous trainers, against the truth: each token scored by the weights that sampled it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mismatch_ext.staleness import of_one_version
from tests.models import tiny_model
from tests.peers.verl.cpu.own_versions import COLDER_FROM, DUMP, FASTER_FROM
from tests.peers.verl.main_ppo import PROMPTS, dtypes, run_verl
from tests.peers.verl.modes import COLOCATE, SEPARATE
from tests.peers.verl.test_main_ppo import FLOAT32_K3

pytestmark = pytest.mark.nightly

MODULES = "tests.peers.verl.cpu.platform,tests.peers.verl.cpu.own_versions"
STEPS, FAULTY = 6, 4
"""Steps of a run, and the first that is scored or trained with its fault."""
KEPT = 2
"""Versions of the weights that a run keeps."""
ROUNDING = 1e-5
"""Mean gap that rounding in float32 leaves at most."""
LEVEL = 0.999
"""Of the intervals: several dozen figures are held to theirs."""
SHARE, ALL = 128, 4096
"""Tokens that a source is asked for: some of what it has, and more than it has."""
SLOW = "actor_rollout_ref.actor.optim.lr=3e-5"
EACH = ("trainer.v1.separate_async.parameter_sync_step=1", f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}")
"""Every update is sent, so that a step has one truth."""
REPLAY = "+mismatch.routing={mode:R3}"


@dataclass(frozen=True)
class Truth:
    """Sums of |Δlogp| and tokens of each rollout that has some `[N]`, of which a source may have scored a share."""

    sums: np.ndarray[Any, np.dtype[np.float64]]
    tokens: np.ndarray[Any, np.dtype[np.float64]]

    @property
    def mean(self) -> float:
        """Mean |Δlogp| per token."""
        return float(self.sums.sum() / self.tokens.sum())

    def interval(self, tokens: float) -> tuple[float, float]:
        """Return where the mean per token of some of these rollouts lies, that have so many tokens together."""
        rows = min(len(self.sums), max(1, round(tokens / self.tokens.mean())))
        chosen = np.random.default_rng(0).integers(len(self.sums), size=(4000, rows))
        means = self.sums[chosen].sum(1) / self.tokens[chosen].sum(1)
        low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return float(low), float(high)


def truth(differences: Tensor, chosen: Tensor) -> Truth | None:
    sums, tokens = (differences.abs() * chosen).sum(1).double(), chosen.sum(1).double()
    some = tokens > 0
    return Truth(sums[some].numpy(), tokens[some].numpy()) if bool(some.any()) else None


@dataclass(frozen=True)
class Step:
    """What a step logged, and the truth of what it may know."""

    logged: dict[str, float]
    sources: dict[str, Truth | None]
    drift: Truth | None
    segments: int

    @property
    def numerics(self) -> float | None:
        """The mean that the step gives for numerics, if it knows one."""
        return self.logged.get("mismatch/numerics/logp_abs_diff_mean")


def read(logged: dict[str, float], dump: dict[str, Any], replayed: bool) -> Step:
    mask, versions, now = dump["mask"], dump["versions"], dump["now"]
    assert bool((versions[mask] >= 0).all())  # the client noted every token
    numerics, drift = dump["rollout"] - dump["own"], dump["own"] - dump["old"]
    # Behind tokens of other weights, routes that are replayed are not those by which the engine's cache was computed anew.
    whole = of_one_version(versions, mask) if replayed else mask
    older = mask & whole & (versions < now) & (versions >= now - KEPT)
    buffer = dump["buffer"]
    sources = {
        "batch": truth(numerics, mask & whole & (versions == now)),
        "buffer": None if buffer is None else truth(buffer["rollout"] - buffer["own"], buffer["mask"]),
        "kept": truth(numerics, older),
    }
    mixed = [len(set(row[own].tolist())) for row, own in zip(versions, mask, strict=True)]
    return Step(logged, sources, truth(drift, older), max(mixed))


Ran = Callable[..., list[Step]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    def run(model: str, tokens: int, *overrides: str, **env: str) -> list[Step]:
        work = tmp_path_factory.mktemp("drift")
        (work / "dumps").mkdir()
        done = run_verl(
            work / "run",
            [
                *overrides,
                f"+mismatch.monitor={{keep_weights:{KEPT},numerics_tokens:{tokens}}}",
                f"trainer.total_training_steps={STEPS}",
            ],
            model=tiny_model(model, work / "model"),
            plugin=True,
            env={"VERL_USE_EXTERNAL_MODULES": MODULES, DUMP: str(work / "dumps"), **env},
        )
        replayed = REPLAY in overrides
        return [read(logged, dumped(work, step), replayed) for step, logged in enumerate(done.expect(STEPS), start=1)]

    return run


def dumped(work: Path, step: int) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(work / f"dumps/{step}.pt", weights_only=True)
    return found


@pytest.fixture(scope="module")
def colder(ran: Ran) -> list[Step]:
    """Return a dense float32 run in `colocate_async` whose trainer scores at a temperature of 0.98 from a step on."""
    return ran("dense", ALL, *COLOCATE, *dtypes("float32"), **{COLDER_FROM: str(FAULTY - 1)})


@pytest.fixture(scope="module")
def faster(ran: Ran) -> list[Step]:
    """Return a float32 run of experts with R3 in `separate_async` whose rate is thirty times its own from a step on."""
    overrides = [*SEPARATE, *EACH, SLOW, REPLAY, *dtypes("float32")]
    return ran("moe", SHARE, *overrides, **{FASTER_FROM: str(FAULTY - 1)})


@pytest.fixture(scope="module", params=[(*COLOCATE,), (*SEPARATE, *EACH)], ids=["colocate_async", "separate_async"])
def rounded(ran: Ran, request: pytest.FixtureRequest) -> list[Step]:
    """Return a bf16 run of experts with R3, without a fault."""
    return ran("moe", SHARE, *request.param, REPLAY, *dtypes("bfloat16"))


def check_sources(steps: list[Step]) -> set[str]:
    """Check that whatever a step gives is the truth of it, and return which sources gave something."""
    used = set()
    for number, step in enumerate(steps, start=1):
        for source, known in step.sources.items():
            tokens = step.logged[f"mismatch/numerics/{source}/tokens"]
            if not tokens:
                continue
            used.add(source)
            assert known is not None, (number, source)
            mean = step.logged[f"mismatch/numerics/{source}/logp_abs_diff_mean"]
            if source == "batch":  # all of them, scored by the same weights
                assert tokens == known.tokens.sum() and mean == pytest.approx(known.mean, rel=1e-3), (
                    number,
                    known.mean,
                )
            low, high = known.interval(tokens)
            print(f"step {number} {source}: {mean:.3g} of {tokens:g} tokens, truth {low:.3g} to {high:.3g}")
            assert low <= mean <= high, (number, source)
        if not any(step.logged[f"mismatch/numerics/{source}/tokens"] for source in step.sources):
            assert step.numerics is None, number
        if (drift := step.logged.get("mismatch/drift/logp_abs_diff_mean")) is not None:
            assert step.drift is not None
            low, high = step.drift.interval(step.logged["mismatch/numerics/kept/tokens"])
            print(f"step {number} drift: {drift:.3g}, truth {low:.3g} to {high:.3g}")
            assert low <= drift <= high, number
    return used


def drifts(steps: list[Step]) -> list[float]:
    found = [step.logged.get("mismatch/drift/logp_abs_diff_mean") for step in steps]
    return [drift for drift in found if drift is not None]


def test_every_source_gives_the_truth(colder: list[Step]) -> None:
    """In verl's colocate_async, numerics by each source and drift are the truth's, in float32."""
    assert check_sources(colder) == {"batch", "buffer", "kept"}
    assert max(step.segments for step in colder) > 1, "no answer was resumed under other weights"


def test_a_fault_of_numerics_is_no_drift(colder: list[Step]) -> None:
    before, after = colder[: FAULTY - 1], colder[FAULTY - 1 :]
    assert max(step.numerics for step in before if step.numerics is not None) <= ROUNDING
    assert min(step.numerics for step in after if step.numerics is not None) > 100 * ROUNDING
    # Drift is that of the weights, whatever temperature both of its sides are scored at.
    assert drifts(after) and max(drifts(after)) < 5 * max(drifts(before))


def test_sources_give_the_truth_where_servers_sample_during_updates(faster: list[Step]) -> None:
    """In verl's separate_async with experts and R3, numerics and drift are the truth's, in float32."""
    assert "kept" in check_sources(faster)


def test_a_higher_rate_is_drift_and_no_numerics(faster: list[Step]) -> None:
    for step in faster:
        if step.numerics is not None:
            assert step.numerics <= ROUNDING and step.logged["mismatch/numerics/k3_kl"] <= FLOAT32_K3
    # The first update at that rate is the faulty step's: what is trained on a step later has drifted by it.
    before, after = drifts(faster[:FAULTY]), drifts(faster[FAULTY:])
    assert before and after and min(after) > 3 * max(before)
    assert min(after) > 100 * ROUNDING


def test_sources_give_the_truth_of_rounding(rounded: list[Step]) -> None:
    """In bf16 with experts and R3, numerics are the truth's, beside drift, in both modes."""
    assert "kept" in check_sources(rounded)
    for step in rounded:
        assert step.numerics is None or step.numerics > 100 * ROUNDING
