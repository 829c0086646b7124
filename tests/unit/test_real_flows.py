"""The command that runs every flow on the real model: what it records of one, and what it runs again."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from examples import real_flows
from examples.real_flows import FLOWS, Flow, read_outcomes, run_flow, run_flows

MEGABYTES = 300


def python(name: str, code: str, **other: object) -> Flow:
    """Return a flow that is a line of Python."""
    return Flow(name=name, title=name, command=[sys.executable, "-c", code], **other)  # type: ignore[arg-type]


def test_a_flow_passes_by_its_status_and_by_what_it_prints(tmp_path: Path) -> None:
    outcome = run_flow(
        python("works", "print('gap  0.5'); raise SystemExit(3)", prints=[r"gap .*"], statuses=[3]), tmp_path
    )
    assert (outcome.status, outcome.said, outcome.why) == ("passed", ["gap 0.5"], "")
    # It is the command that was run, without this machine's folders.
    assert "raise SystemExit(3)" in outcome.command and str(real_flows.ROOT) not in outcome.command and outcome.date


@pytest.mark.parametrize(
    ("code", "why"),
    [("print('gap 0.5'); raise SystemExit(1)", "status 1"), ("print('nothing')", "did not print gap")],
)
def test_a_flow_that_ends_otherwise_has_failed(tmp_path: Path, code: str, why: str) -> None:
    outcome = run_flow(python("breaks", code, prints=[r"gap .*"]), tmp_path)
    assert outcome.status == "failed" and why in outcome.why.splitlines()[0]


def test_two_flows_meet_at_ports_of_their_own(tmp_path: Path) -> None:
    """TRL and vLLM take a fixed port where nobody names one, which another run may hold."""
    code = "import os; print('port', os.environ['MASTER_PORT'])"
    ports = [run_flow(python("meets", code, prints=[r"port \d+"]), tmp_path).said for _ in range(2)]
    assert ports[0] != ports[1]


def test_a_flow_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    outcome = run_flow(python("hangs", "import time; time.sleep(3600)", prints=[]), tmp_path, limit=1)
    assert outcome.status == "timed out"


def test_memory_is_that_of_all_processes_of_a_flow(tmp_path: Path) -> None:
    """Each of two processes holds its own memory for as long as the other one does."""
    holds = f"held = bytearray(b'x') * {MEGABYTES}_000_000; import time; time.sleep(4)"
    code = f"import subprocess, sys; other = subprocess.Popen([sys.executable, '-c', {holds!r}]); {holds}; other.wait()"
    outcome = run_flow(python("holds", code, prints=[]), tmp_path)
    assert outcome.status == "passed" and outcome.peak_gb >= 2 * MEGABYTES / 1000


def test_each_outcome_is_kept_and_the_last_one_counts(tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    run_flows([python("one", "print(1)", prints=["2"]), python("two", "print(2)", prints=["2"])], tmp_path, console)
    found = run_flows([python("one", "print(2)", prints=["2"])], tmp_path, console)
    assert {name: outcome.status for name, outcome in found.items()} == {"one": "passed", "two": "passed"}
    assert len((tmp_path / "flows.jsonl").read_text(encoding="utf-8").splitlines()) == 3
    assert read_outcomes(tmp_path / "flows.jsonl") == found


def test_a_call_runs_what_has_not_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flows = (python("works", "print(1)", prints=["1"]), python("breaks", "print(1)", prints=["2"]))
    monkeypatch.setattr(real_flows, "FLOWS", flows)
    monkeypatch.setattr(real_flows, "ROOT", tmp_path)
    monkeypatch.setattr(real_flows, "prepare", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["real_flows", "--record", str(tmp_path / "real.json")])
    for _ in range(2):
        with pytest.raises(SystemExit, match="did not pass: breaks"):
            real_flows.main()
    lines = (tmp_path / real_flows.WORK / "flows.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["works", "breaks", "breaks"]
    recorded = json.loads((tmp_path / "real.json").read_text(encoding="utf-8"))
    assert [row["status"] for row in recorded["figures"]] == ["passed", "failed"] and recorded["cpu"]


@pytest.mark.parametrize("flow", [flow for flow in FLOWS if flow.script is not None], ids=lambda flow: flow.name)
def test_the_scripts_of_pages_run_here_with_the_real_model(flow: Flow) -> None:
    assert flow.script is not None
    text = flow.script.text(Path("runs/somewhere"))
    compile(text, flow.name, "exec")
    assert real_flows.MODEL in text and "Qwen" not in text and "max_steps=1" in text and "runs/somewhere" in text
    assert "def reward" in text and "trainer.train()" in text


def test_every_flow_has_a_name_of_its_own() -> None:
    names = [flow.name for flow in FLOWS]
    assert len(set(names)) == len(names)
