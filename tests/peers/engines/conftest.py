"""What the tests of several engines share: an engine's start takes longer than what it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.peers.engines.sglang_environment import run_sglang
from tests.peers.scenarios import named

scenarios = named("tests.peers.engines.scenarios_sglang")


@pytest.fixture(scope="package")
def sglang_in_float32(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], dict[str, Any]]:
    """Return a function that does everything in float32 with a version of SGLang and a way to reach it, once for each."""

    @cache
    def found(version: str, way: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("exact")
        return dict(run_sglang(scenarios.exact, version, folder, model=moe, way=way))

    return found
