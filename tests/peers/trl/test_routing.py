"""The `routing` section in the real TRL: R2 with transformers' generation, R3 with vLLM, and routes that must be refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.scenarios import Run, named

scenarios = named("tests.peers.trl.scenarios_routing")


pytestmark = pytest.mark.engine


def test_replay_of_the_models_own_routes_changes_no_bit(run: Run, moe: Path, tmp_path: Path) -> None:
    run(scenarios.transformers, model=moe, out=tmp_path, timeout=600).expect()


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_adapters_and_their_reference(run: Run, moe: Path, tmp_path: Path, mode: str) -> None:
    run(scenarios.lora, model=moe, out=tmp_path, mode=mode).expect()


def test_evaluation_is_replayed_and_counted_apart(run: Run, moe: Path, tmp_path: Path) -> None:
    run(scenarios.evaluation, model=moe, out=tmp_path).expect()


def test_a_loss_of_tokens_that_were_not_sampled_is_refused(run: Run, moe: Path, tmp_path: Path) -> None:
    run(scenarios.unknown_tokens, model=moe, out=tmp_path).expect()


def test_other_tokens_in_the_loss_are_routed_by_the_model(run: Run, moe: Path, tmp_path: Path) -> None:
    run(scenarios.other_tokens, model=moe, out=tmp_path, timeout=600).expect()


def test_a_pass_beside_the_loss_does_not_stand_for_the_losss_own(run: Run, moe: Path, tmp_path: Path) -> None:
    run(scenarios.own_pass, model=moe, out=tmp_path).expect()


@pytest.mark.numeric
def test_float32_engine_and_trainer_route_identically(run: Run, moe: Path, tmp_path: Path) -> None:
    run(scenarios.float32, model=moe, out=tmp_path).expect()


@pytest.mark.numeric
def test_replay_closes_the_bf16_gap_on_the_same_tokens(run: Run, moe: Path, tmp_path: Path) -> None:
    run(scenarios.bfloat16, model=moe, out=tmp_path).expect()


def test_iterations_accumulation_and_checkpointing_with_vllm(run: Run, moe: Path, tmp_path: Path) -> None:
    run(scenarios.iterations, model=moe, out=tmp_path).expect()


def test_faulty_routes_are_named_or_refused_before_there_are_gradients(run: Run, moe: Path, tmp_path: Path) -> None:
    run(scenarios.faults, model=moe, out=tmp_path).expect()
