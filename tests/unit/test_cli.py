"""The command line: two lines on success, one line on stderr and status 2 on error."""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
from pathlib import Path

import pytest

from mismatch_ext import cli
from mismatch_ext.errors import RunDirectoryError
from tests.unit.synthetic_runs import write_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("cli") / "run", "bf16", steps=3)


def test_report_prints_the_path_and_the_verdict(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", str(run_dir)]) == 0
    path, sentence = capsys.readouterr().out.splitlines()
    assert path == str(run_dir / "report.html") and Path(path).stat().st_size > 1_000_000
    assert sentence.startswith("bf16 (mean |Δlogp| ") and sentence in Path(path).read_text(encoding="utf-8")
    assert cli.main(["report", str(run_dir), "--out", str(tmp_path / "x.html")]) == 0
    assert capsys.readouterr().out.splitlines()[0] == str(tmp_path / "x.html")


def test_an_error_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path / "absent\nplace")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("error: ") and "does not exist" in err


def test_a_missing_renderer_is_named(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    assert cli.main(["report", str(run_dir)]) == 2
    assert "pip install mismatch-ext[report]" in capsys.readouterr().err


def test_without_a_subcommand_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "report" in capsys.readouterr().err


def test_a_terminal_without_greek_letters_gets_a_question_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    cli.say("mean |Δlogp|")
    sys.stdout.flush()
    assert raw.getvalue() == b"mean |?logp|\n"


def test_another_module_can_register_a_subcommand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "COMMANDS", dict(cli.COMMANDS))

    def configure(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("model")

    @cli.command("probe", help="Probe a model.", configure=configure)
    def probe(arguments: argparse.Namespace) -> int:
        raise RunDirectoryError(f"{arguments.model} is odd")

    assert cli.main(["probe", "tiny"]) == 2
    assert capsys.readouterr().err == "error: tiny is odd\n"
    with pytest.raises(ValueError, match="'probe' is registered twice"):
        cli.command("probe", help="", configure=configure)(probe)


def test_the_module_runs_as_a_program_and_loads_no_renderer_to_start(tmp_path: Path) -> None:
    code = "import sys, mismatch_ext.cli; print('plotly' in sys.modules, 'jinja2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
    done = subprocess.run(
        [sys.executable, "-m", "mismatch_ext.cli", "report", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr
