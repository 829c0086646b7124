"""Figures in README and docs are those of evidence/*.json, which only a test that passed has written."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.evidence import __main__ as command
from tests.evidence import judges, pages
from tests.evidence.compare import compared
from tests.evidence.machine import ROOT, machine, pinned, provenance
from tests.evidence.slices import SLICES, pick

RECORDS = pages.read_records()
TEST = '''
def test_a_claim(evidence):
    """FP16 is finer."""
    evidence("claim", {"ratio": {"value": 8.0, "low": 7.5, "high": 8.5}, "tokens": 51200}, command="make demo")
'''


def run(tmp_path: Path, body: str) -> dict[str, Any] | None:
    """Run a test with the fixture in a process of its own; return what it wrote."""
    (tmp_path / "conftest.py").write_text("from tests.evidence.conftest import evidence, pytest_runtest_makereport\n")
    (tmp_path / "test_it.py").write_text(body)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--rootdir={tmp_path}",
            tmp_path / "test_it.py",
        ],
        env={**os.environ, "MISMATCH_EVIDENCE_DIR": str(tmp_path / "out"), "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        timeout=300,
    )
    found = list((tmp_path / "out").glob("*.json"))
    return json.loads(found[0].read_text()) if found else None


# The fixture.


def test_a_passed_test_writes_figures_machine_versions_and_commit(tmp_path: Path) -> None:
    record = run(tmp_path, TEST)
    assert record is not None
    assert (record["name"], record["claim"], record["command"]) == ("claim", "FP16 is finer.", "make demo")
    assert record["test"] == "test_it.py::test_a_claim"
    assert record["figures"]["ratio"]["low"] == 7.5
    assert record["machine"]["cpu"] and record["machine"]["cores"] == os.cpu_count()
    assert {"torch", "transformers", "trl", "vllm", "verl"} <= set(record["versions"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", record["date"])
    assert record["commit"] == provenance()["commit"] and isinstance(record["dirty"], bool)


@pytest.mark.parametrize(
    "fault",
    [
        "    assert False\n",
        "    evidence('other', {'ratio': float('nan')})\n",
        "    evidence('claim', {'again': 1})\n",
        "    evidence('none', {})\n",
        "    import pytest; pytest.skip('no engine')\n",
    ],
)
def test_a_test_that_did_not_pass_writes_nothing(tmp_path: Path, fault: str) -> None:
    record = run(tmp_path, TEST + fault)
    # A figure that is not finite is found when it is written; what was judged before it stands.
    assert record is None or (record["name"] == "claim" and "nan" in fault)


def test_a_claim_is_needed(tmp_path: Path) -> None:
    assert run(tmp_path, TEST.replace('"""FP16 is finer."""', "pass")) is None


def test_the_machine_says_what_decides_the_kernels() -> None:
    found = machine()
    assert found["instruction_sets"] and found["memory_gib"] > 0


# The slices.


def test_every_file_is_in_one_slice() -> None:
    listed = [path for chosen in SLICES for path in chosen.paths()]
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests/evidence").glob("test_*.py")}
    assert sorted(listed) == sorted(set(listed)) and set(listed) == there


def test_commits_in_a_row_run_every_slice_and_the_oldest_between() -> None:
    dates = ["2026-02", "2026-01", None, "2026-03"]
    assert [pick(dates, count)[0] for count in range(0, 16, 4)] == [1, 2, 3, 4]
    assert [pick(dates, count)[0] for count in range(2, 16, 4)] == [2] * 4
    assert {pick(["", "", None, "2026-03"], count)[0] for count in range(2, 16, 4)} == {1, 2}
    assert "not recorded" in pick(["", None], 2)[1] and pages.due()[0] in range(1, len(SLICES) + 1)


def test_a_slice_that_takes_too_long_is_ended(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "command_of", lambda chosen: ["sleep", "60"])
    assert command.run(SLICES[0], limit=0.2) == 124
    assert SLICES[0].title in capfd.readouterr().out


def test_every_name_that_is_written_has_a_file_or_is_listed() -> None:
    named = {*pages.written_by(), *pages.MEASURED_BY.values()}
    assert set(pages.MEASURED_BY.values()) <= set(pages.written_by())
    assert named == set(RECORDS) | set(pages.NOT_YET_RECORDED)
    assert not set(RECORDS) & set(pages.NOT_YET_RECORDED)


def test_a_file_that_is_lost_is_named() -> None:
    page = pages.QUOTED_IN["replay_gap"]
    with pytest.raises(ValueError, match="evidence/replay_gap.json is missing"):
        pages.with_parts(
            page,
            page.read_text(encoding="utf-8"),
            {name: record for name, record in RECORDS.items() if name != "replay_gap"},
        )


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_evidence_is_of_the_pinned_versions(name: str) -> None:
    pins = pinned()
    found = {peer: version.partition("+")[0] for peer, version in RECORDS[name]["versions"].items()}
    assert found == {peer: pins[peer] for peer in found}, f"measure anew: make evidence SLICE={pages.slice_of(name)}"


def test_new_figures_are_compared_with_those_recorded() -> None:
    before = {"name": "x", "machine": {"cpu": "A"}, "versions": {}, "figures": {"ratio": around(8.0), "count": 10}}
    same, moved, far = (copy.deepcopy(before) for _ in range(3))
    moved["figures"] = {"ratio": around(8.6), "count": 30}
    far["figures"]["ratio"] = around(9.0)
    assert compared(before, same) == ([], [])
    assert len(compared(before, moved)[0]) == 2 and not compared(before, moved)[1]
    assert len(compared(before, far)[1]) == 1
    assert compared(before, {**far, "machine": {"cpu": "B"}}) == ([], [])
    assert compared(before, {**far, "machine": {"cpu": "A", "instruction_sets": ["avx512f"]}}) == ([], [])


def test_the_command_lists_slices_and_refuses_others() -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "tests.evidence", "--list"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert len(listed.stdout.splitlines()) == len(SLICES)
    refused = subprocess.run(
        [sys.executable, "-m", "tests.evidence", "--slice", "99"], cwd=ROOT, capture_output=True, text=True
    )
    assert refused.returncode != 0 and f"must be 1 to {len(SLICES)}" in refused.stderr


# The pages.


def test_the_page_is_current() -> None:
    assert pages.PAGE.read_text(encoding="utf-8") == pages.evidence_page(RECORDS), (
        "run python -m tests.evidence --pages"
    )


def test_what_other_pages_quote_is_current() -> None:
    assert set(pages.QUOTED_IN) == set(pages.PARTS)
    for page in set(pages.QUOTED_IN.values()):
        text = page.read_text(encoding="utf-8")
        assert text == pages.with_parts(page, text, RECORDS), "run python -m tests.evidence --pages"


def test_every_file_is_of_a_test_that_is_there() -> None:
    for name, record in RECORDS.items():
        path, _, test = record["test"].partition("::")
        source = (ROOT / path).read_text(encoding="utf-8")
        assert f"def {test}(" in source and f'"{name}"' in source, name
        assert record["claim"] in source, f"{name}: the claim has changed since it was measured"


def test_a_figure_changed_by_hand_is_seen() -> None:
    recorded = [name for name, file in pages.MEASURED_BY.items() if file in RECORDS]
    assert recorded
    for name in recorded:
        page = pages.QUOTED_IN[name]
        text = page.read_text(encoding="utf-8")
        begin = text.index(f"<!-- begin evidence {name} -->")
        end = text.index(f"<!-- end evidence {name} -->")
        place = max(match.start() for match in re.finditer(r"\d", text[begin:end])) + begin
        changed = text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :]
        assert pages.with_parts(page, changed, RECORDS) != changed, name


def test_an_evidence_file_that_changed_is_seen() -> None:
    page = pages.QUOTED_IN["replay_gap"]
    text = page.read_text(encoding="utf-8")
    changed = copy.deepcopy(RECORDS)
    changed["replay_gap"]["figures"]["eval/familiar"]["replayed"]["k3"] *= 1.5
    assert pages.with_parts(page, text, changed) != text
    assert pages.evidence_page(changed) != pages.evidence_page(RECORDS)


def test_a_lost_mark_is_named() -> None:
    text = pages.README.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="lost a mark of the evidence 'demo'"):
        pages.with_parts(pages.README, text.replace("<!-- end evidence demo -->", ""), RECORDS)


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (1.1512e-3, 3, "1.15e-3"),
        (212_352.0, 3, "212,352"),
        (0.7312, 2, "0.73"),
        (69.96, 2, "70"),
        (123.4, 2, "123"),
        (0, 3, "0"),
        (3.1e-7, 2, "3.1e-7"),
    ],
)
def test_figures_are_written_for_a_reader(value: float, digits: int, text: str) -> None:
    assert pages.number(value, digits) == text


# The judges.


def around(value: float, half: float = 0.05) -> dict[str, float]:
    """Return an interval of a twentieth to either side."""
    return {"value": value, "low": value * (1 - half), "high": value * (1 + half)}


def test_fp16_is_judged_by_its_significant_bits() -> None:
    judges.fp16_is_finer(around(8.0), around(68.0))  # as on a Xeon with AMX
    judges.fp16_is_finer(around(8.5), around(70.0))  # as on an EPYC
    judges.fp16_is_finer(
        around(7.3, 0.1), around(51.0, 0.5)
    )  # as wide as k3's heavy tail makes it on 58 thousand tokens
    # FP16 that is only as good as a tenth of the effect: 1 + 7 / 10 times finer, or 1 + 63 / 10 in k3.
    with pytest.raises(AssertionError, match="mean"):
        judges.fp16_is_finer(around(1.7), around(68.0))
    with pytest.raises(AssertionError, match="k3"):
        judges.fp16_is_finer(around(8.0), around(7.3))


def test_a_ratio_that_is_not_sure_enough_is_no_evidence() -> None:
    with pytest.raises(AssertionError, match="mean"):
        judges.fp16_is_finer({"value": 8.0, "low": 3.9, "high": 12.1}, around(68.0))
    with pytest.raises(AssertionError, match="50000 are needed"):
        judges.enough_tokens(49_999)
    judges.enough_tokens(50_000)


def test_the_tail_and_float32s_routes_are_judged_beside_bf16s() -> None:
    judges.replay_mends_the_tail(around(0.2))
    with pytest.raises(AssertionError, match="factor of 2"):
        judges.replay_mends_the_tail(around(0.92))  # a tenth of the effect
    judges.float32_routes_alike(0.0, 0.0133, 60_000)
    judges.float32_routes_alike(3 / 240_000, 0.0133, 60_000)  # two experts as near as float32 rounds
    with pytest.raises(AssertionError, match="a hundredth is allowed"):
        judges.float32_routes_alike(0.00133, 0.0133, 60_000)  # bf16's routes for a token in ten
    with pytest.raises(AssertionError, match="nothing to compare"):
        judges.float32_routes_alike(0.0, 0.0, 60_000)
    with pytest.raises(AssertionError, match="50000 are needed"):
        judges.float32_routes_alike(0.0, 0.0133, 40_000)


def test_float32_is_judged_by_its_own_rounding() -> None:
    judges.float32_is_the_oracle(around(1.02), around(1.3))
    judges.float32_is_the_oracle(around(2.0), around(4.0))  # as much of the engine's own as triangles allow
    # bf16 somewhere in a tenth of the tokens, or a fault of a tenth of bf16's gap: hundreds of times float32's rounding.
    with pytest.raises(AssertionError, match="mean"):
        judges.float32_is_the_oracle(around(300.0), around(9e4))
    with pytest.raises(AssertionError, match="k3"):
        judges.float32_is_the_oracle(around(1.5), around(100.0))


def test_a_reward_climbs_by_more_than_chance() -> None:
    noise = 0.07 * np.random.default_rng(0).standard_normal(24)
    climb = np.linspace(0.58, 0.74, 24)
    judges.reward_climbs(list(climb + noise))
    tenth = 0.58 + (climb - 0.58) / 10
    with pytest.raises(AssertionError, match="slope is"):
        judges.reward_climbs(list(tenth + noise))
