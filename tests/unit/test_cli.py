"""The command line: two lines on success, one line on stderr and status 2 on error."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mismatch_ext.adapters.cli import COMMANDS
from mismatch_ext.adapters.cli import main as every_command

from mismatch_ext import cli
from tests.unit.synthetic_runs import write_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("cli") / "run", "bf16", steps=3)


def test_report_prints_the_path_and_the_verdict(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(run_dir)]) == 0
    path, sentence = capsys.readouterr().out.splitlines()
    assert path == str(run_dir / "report.html") and Path(path).stat().st_size > 1_000_000
    assert sentence in Path(path).read_text(encoding="utf-8")


def test_the_verdict_as_json(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(run_dir), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"]["bf16"]["level"] == "elevated" and found["report"] == str(run_dir / "report.html")


def test_an_error_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path / "absent\nplace")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("error: ") and "does not exist" in err


STEERING = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202e\x7f"


def test_names_of_runs_do_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Two runs, so that the verdict has both names; a line of its own would pass for one of ours.
    for name in (f"a{STEERING}\nready to train", "b"):
        run = write_run(tmp_path / STEERING / name.replace("\n", " "), "bf16", steps=3)
        metrics = run / "metrics-000.jsonl"
        lines = metrics.read_text().splitlines()
        header = json.loads(lines[0])
        header["run"]["name"] = name
        metrics.write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    assert cli.main(["report", str(tmp_path / STEERING), "--out", str(tmp_path / f"{STEERING}.html")]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 2 and out.replace("\n", "").isprintable()
    assert cli.main(["report", f"{tmp_path}/{STEERING}/none"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.rstrip("\n").isprintable()


def test_the_command_loads_no_renderer_to_start() -> None:
    code = "import sys, mismatch_ext.cli; print('plotly' in sys.modules, 'jinja2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_the_page_has_the_exit_statuses_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/index.md").read_text(encoding="utf-8")
    table = page.partition("## Exit statuses")[2].partition("\n## ")[0]
    named = {
        name for cell in re.findall(r"^\| (`[^|]*) \|", table, flags=re.M) for name in re.findall(r"`(\w+)`", cell)
    }
    assert named == {command.name for command in COMMANDS}
    for command in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            every_command([command.name, "--no-such-option"])
        assert ended.value.code == 2 and "usage: mismatch-ext" in capsys.readouterr().err
