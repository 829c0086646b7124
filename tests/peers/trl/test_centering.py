"""Score centering in the real TRL with vLLM: what it adds to the gradient, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.peers.scenarios import Run, named
from tests.unit.loops import Two

scenarios = named("tests.peers.trl.scenarios_centering")


@pytest.mark.engine
@pytest.mark.numeric
def test_the_term_is_the_formula_in_every_loss(run: Run, untied: Path, tmp_path: Path) -> None:
    run(scenarios.formula, model=untied, out=tmp_path, timeout=600).expect()


@pytest.mark.engine
@pytest.mark.numeric
def test_steps_with_it_without_it_and_with_its_measurement_alone(run: Run, dense: Path, tmp_path: Path) -> None:
    run(scenarios.trainings, model=dense, out=tmp_path).expect()


def test_its_measure_is_of_both_ranks_tokens() -> None:
    from types import SimpleNamespace

    from mismatch_ext.adapters.trl.centering import Centering

    centering: Any = object.__new__(Centering)
    trainer = SimpleNamespace(accelerator=SimpleNamespace(device="cpu"))
    biases = torch.tensor([3.0, 15.0], dtype=torch.float64)
    vars(centering).update(top_k=6, run=SimpleNamespace(ranks=Two(sums=5.0)), trainer=trainer, _biases=biases)
    assert centering.metrics() == {"sampler_bias": (3 + 5) / (15 + 5)}
