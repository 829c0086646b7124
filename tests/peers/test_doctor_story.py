"""The story of a LoRA adapter in docs/doctor.md, as far as the doctor starts no engine; tests/evidence runs all stories."""

from __future__ import annotations

import pytest

from tests.stories import run


@pytest.mark.engine
@pytest.mark.numeric
def test_the_adapter_that_never_reached_the_engine_is_named() -> None:
    run("A LoRA adapter never reaches the engine", first=2)
