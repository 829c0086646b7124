"""The command line: two lines on success, one line on stderr and status 2 on error."""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mismatch_ext.adapters.cli import COMMANDS
from mismatch_ext.adapters.cli import main as every_command

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


def test_the_verdict_as_json(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(run_dir), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"]["bf16"]["level"] == "elevated" and found["report"] == str(run_dir / "report.html")
    assert found["verdict"].startswith("bf16 (mean |Δlogp| ") and found["problems"] == []
    assert found["rows"][0]["values"]["k3_kl"] > 0


def test_an_error_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path / "absent\nplace")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("error: ") and "does not exist" in err


def test_an_error_with_json_is_an_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "--json", str(tmp_path / "absent")]) == 2
    out, err = capsys.readouterr()
    assert err == f"error: {json.loads(out)['error']}\n"
    assert "does not exist" in err and "trainer_state.json, verl's jsonl" in err


def test_a_reader_that_closes_the_pipe_gets_no_traceback(run_dir: Path) -> None:
    command = [sys.executable, "-m", "mismatch_ext.cli", "report", "--json", str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == 141


def test_a_missing_renderer_is_named(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    assert cli.main(["report", str(run_dir)]) == 2
    assert "pip install 'plotly>=6'" in capsys.readouterr().err


def test_without_a_subcommand_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "report" in capsys.readouterr().err


def test_a_terminal_without_greek_letters_gets_a_question_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    cli.say("mean |Δlogp|")
    sys.stdout.flush()
    assert raw.getvalue() == b"mean |?logp|\n"


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
    assert r"a\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202e\x7f" in out
    assert cli.main(["report", f"{tmp_path}/{STEERING}/none"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.rstrip("\n").isprintable()


def test_what_is_said_keeps_its_lines_and_its_letters(capsys: pytest.CaptureFixture[str]) -> None:
    cli.say("gap\t|Δlogp| 重い\n  \udcff zero\u200bwidth")
    assert capsys.readouterr().out == "gap\t|Δlogp| 重い\n  \\udcff zero\\u200bwidth\n"


def test_a_home_folder_that_the_shell_left_alone(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(run_dir.parent))
    assert cli.main(["report", "~/run", f"--out={'~'}/home.html"]) == 0
    assert (run_dir.parent / "home.html").exists()
    with pytest.raises(SystemExit):
        cli.main(["report", "~nobody-of-that-name/run"])
    assert "nobody-of-that-name" in capsys.readouterr().err


def test_an_error_of_a_further_subcommand_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def configure(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("model")

    def probe(arguments: argparse.Namespace) -> int:
        raise RunDirectoryError(f"{arguments.model} is odd")

    commands = [cli.REPORT, cli.Command(name="probe", help="Probe a model.", configure=configure, run=probe)]
    assert cli.run_command(commands, ["probe", "tiny"]) == 2
    assert capsys.readouterr().err == "error: tiny is odd\n"


def test_the_module_runs_as_a_program_and_loads_no_renderer_to_start(tmp_path: Path) -> None:
    code = "import sys, mismatch_ext.cli; print('plotly' in sys.modules, 'jinja2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
    done = subprocess.run(
        [sys.executable, "-m", "mismatch_ext.cli", "report", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr


def test_the_page_has_the_exit_statuses_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/index.md").read_text(encoding="utf-8")
    table = page.partition("## Exit statuses")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*) \|[^|]*\|[^|]*\|([^|]*)\|[^|]*\|$", table, flags=re.M)
    assert sorted(name for names, _ in rows for name in re.findall(r"`(\w+)`", names)) == sorted(
        command.name for command in COMMANDS
    )
    assert all("an error" in of_2 for _, of_2 in rows)
    for command in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            every_command([command.name, "--no-such-option"])
        assert ended.value.code == 2 and "usage: mismatch-ext" in capsys.readouterr().err
