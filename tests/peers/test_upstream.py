"""Faults of peers that docs/upstream shows: each is seen in the installed version, and not with its workaround.

Those that start an engine or a process are run by `python -m docs.upstream` alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from docs.upstream.scripts import SCRIPTS, read
from docs.upstream.shown import HOLDS, MENDED
from tests.cpu import has_fp8_cache
from tests.peers.engines.sglang_environment import MAIN, run_sglang
from tests.peers.scenarios import Run, named

scenarios = named("tests.peers.scenarios_upstream")
verl_scenarios = named("tests.peers.verl.in_process.scenarios_upstream")


pytestmark = pytest.mark.nightly
NEED_AVX512 = ("vllm_fp8_cache",)
"""Scripts whose kernel vLLM compiles for CPUs with AVX-512 alone."""


def fast(*peers: str) -> list[str]:
    return [name for name in SCRIPTS if (script := read(name)).peer in peers and not script.alone]


def check(found: list[dict[str, Any]], names: list[str]) -> None:
    stock = {one["script"]: one for one in found if not one["workaround"]}
    ours = {one["script"]: one for one in found if one["workaround"]}
    assert set(stock) == set(ours) == set(names) and names
    mended = [f"{name}: {one['seen']}" for name, one in stock.items() if one["status"] != HOLDS]
    assert not mended, "fixed upstream, so that the workaround can go"
    assert not [f"{name}: {one['seen']}" for name, one in ours.items() if one["status"] != MENDED]


@pytest.mark.parametrize("peers", [("torch", "transformers", "accelerate", "trl"), ("vllm",)], ids=" ".join)
def test_faults_are_seen_without_the_workaround_alone(run: Run, peers: tuple[str, ...]) -> None:
    names, found = fast(*peers), run(scenarios.shown, names=fast(*peers)).expect()["shown"]
    if not has_fp8_cache():
        # The fault cannot come up: vLLM has no such cache on this CPU.
        there = [one for one in found if one["script"] in NEED_AVX512 and not one["workaround"]]
        assert all("Unsupported CPU attention configuration" in one["seen"] for one in there), there
        names = [name for name in names if name not in NEED_AVX512]
        found = [one for one in found if one["script"] in names]
    if names:
        check(found, names)


def test_faults_of_verl_and_megatron_are_seen_without_the_workaround_alone(run: Run) -> None:
    names = fast("verl", "megatron-core")
    check(run(verl_scenarios.shown, names=names).expect()["shown"], names)


def test_faults_of_sglang_are_seen_without_the_workaround_alone(tmp_path: Path) -> None:
    names = fast("sglang")
    check(run_sglang(scenarios.shown, MAIN, tmp_path, names=names)["shown"], names)
