"""Weight updates of models whose experts transformers fuses and names otherwise than their checkpoints do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import tiny_mixtral
from tests.oracle import expect_float32
from tests.peers.scenarios import Run, named

scenarios_training = named("tests.peers.trl.scenarios_training")

pytestmark = [pytest.mark.engine, pytest.mark.numeric]


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_mixtral(tmp_path_factory.mktemp("mixtral"))


def test_mixtral_trains_with_routes_in_trl(run: Run, mixtral: Path, tmp_path: Path) -> None:
    block = {"precision": {"dtype": "float32"}, "routing": {"mode": "R3"}, "monitor": {"weight_sync": "error"}}
    found = run(scenarios_training.train, model=mixtral, out=tmp_path, block=block).expect()
    assert (found["verdict"], found["weight_version"]) == ("in_sync", 3)
    expect_float32(found["history"], found["float32_errors"])
