"""Gemma-2 in TRL with real vLLM: transformers' own attention drops its soft cap, and vLLM's does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import tiny_gemma2
from tests.peers.scenarios import Run, named

scenarios = named("tests.peers.trl.scenarios_attention")


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.numeric
def test_a_file_of_gemma_2_is_clean_with_eager_and_names_the_attention_without(run: Run, tmp_path: Path) -> None:
    run(scenarios.examined_files, model=tiny_gemma2(tmp_path / "model"), out=tmp_path).expect()


@pytest.mark.engine
def test_a_run_of_gemma_2_is_warned_at_its_start_and_no_update_is_blamed(run: Run, tmp_path: Path) -> None:
    run(scenarios.trained, model=tiny_gemma2(tmp_path / "model"), out=tmp_path).expect()
