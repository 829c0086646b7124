"""What of the README takes too long for every landing: its other Python blocks, and the installation of what is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import tiny_model
from tests.peers.test_readme import EVERY_LANDING
from tests.readme import PYTHON, in_readme, run_block, shell

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("block", sorted(set(range(len(PYTHON))) - set(EVERY_LANDING)))
def test_the_other_python_blocks_run(tmp_path: Path, block: int) -> None:
    models = {kind: tiny_model(kind, tmp_path / kind) for kind in ("dense", "moe")}
    run_block(block, models, tmp_path)


def test_pip_install(tmp_path: Path) -> None:
    shell(f"python -m build --wheel --no-isolation --outdir {tmp_path}/dist . && python -m venv {tmp_path}/venv")
    command = in_readme("pip install").replace("pip install", f"{tmp_path}/venv/bin/pip install --no-index --no-deps")
    shell(f"{command} --find-links {tmp_path}/dist")
    # That no requirement pins torch or vLLM is read off the wheel in tests/unit/test_packaging.py.
    assert "mismatch-ext==" in shell(f"cd {tmp_path} && {tmp_path}/venv/bin/pip list --format freeze")
