"""The story of a LoRA adapter in docs/doctor.md, command by command; tests/evidence runs the others."""

from __future__ import annotations

import pytest

from tests.stories import run


@pytest.mark.engine
@pytest.mark.numeric
def test_the_adapter_that_never_reached_the_engine_is_named() -> None:
    run("A LoRA adapter never reaches the engine")
