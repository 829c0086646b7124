"""Every section, preset and choice in every host: active, as read back from what is stepped, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mismatch_ext.presets import DPPO
from tests.peers.scenarios import Run, named
from tests.peers.section_cases import CASES, HOSTS, names

in_trl = named("tests.peers.trl.scenarios_sections")
in_verl = named("tests.peers.verl.in_process.scenarios_sections")

pytestmark = pytest.mark.engine
# What a message says to do.
REMEDIES = ("emove", "leave out", "eave it out", "set ", "Set ", "use ", "Use ", "Choose ", "allowed:")


@pytest.fixture(scope="module")
def found(run: Run, dense: Path, moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what became of every case in every host."""
    given = {"dense": dense, "moe": moe}
    trl = run(in_trl.hosts, out=tmp_path_factory.mktemp("trl"), timeout=600, **given).expect()
    verl = run(in_verl.every, out=tmp_path_factory.mktemp("verl"), timeout=600, **given).expect()
    return {**trl, "verl": verl}


@pytest.mark.parametrize("host", HOSTS)
def test_every_case_is_active_or_refused_by_name(found: Any, host: str) -> None:
    assert list(found[host]) == names()
    for case, one in found[host].items():
        section, _, label = case.partition("/")
        if "refused" in one:
            said = one["refused"]
            assert f"mismatch.{section}" in said or "a mismatch block" in said, (case, said)
            assert any(word in said for word in REMEDIES), (case, said)
            continue
        # What is stepped is what was computed by hand, and not what it would be without the section.
        assert one["error"] < 1e-4, (case, one)
        unweighed = label == "preset: disabled" and host == "verl"  # whose own default weighs nothing either
        assert unweighed or one["effect"] > 1e-3, (case, one)


def test_the_hosts_take_what_they_are_documented_to_take(found: Any) -> None:
    active = {host: {case for case, one in found[host].items() if "refused" not in one} for host in HOSTS}
    assert set(names()) - active["TRL GRPO"] == {"kl/estimator: full"}
    assert {case.partition("/")[0] for case in active["TRL RLOO"]} == {"precision", "routing", "lr", "monitor"}
    refused = {f"correction/preset: {name}" for name in ("geo_mask", "slime_mis", "slime_cis", "cis", *DPPO)}
    assert set(names()) - active["verl"] == {"kl/estimator: full", *refused}
    assert {case.partition("/")[0] for case in active["MismatchCallback"]} == {"lr", "monitor"}
    assert len(CASES["correction"]) == 34


def test_fsdp1_with_a_fused_head_takes_what_fsdp2_takes(run: Run, dense: Path, moe: Path, tmp_path: Path) -> None:
    # Corrections are of log-probabilities alone, whose gradient the KL terms go through as well.
    host = {"VERL_TEST_STRATEGY": "fsdp", "VERL_TEST_FUSED": "1"}
    only = ["precision", "kl", "routing", "lr"]
    verl = run(in_verl.every, dense=dense, moe=moe, out=tmp_path, only=only, env=host, timeout=600).expect()
    assert {case.partition("/")[0] for case in verl} == set(only)
    assert {case for case, one in verl.items() if "refused" in one} == {"kl/estimator: full"}
    for case, one in verl.items():
        if "refused" not in one:
            assert one["error"] < 1e-4 and one["effect"] > 1e-3, (case, one)
