"""The stories of docs/index.md and docs/doctor.md, command by command."""

from __future__ import annotations

import pytest

from tests.stories import run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]


def test_the_quick_start() -> None:
    run("Ten minutes: symptom, doctor, flag, report")


def test_a_nucleus_is_named_whether_or_not_it_leaves_a_gap() -> None:
    run("TRL samples a nucleus")


def test_an_adapter_that_is_missing_and_one_that_is_older_are_named() -> None:
    run("A LoRA adapter never reaches the engine")


def test_routes_and_rounding_of_a_run_of_verl_are_told_apart() -> None:
    run("verl trains a mixture of experts in bf16")
