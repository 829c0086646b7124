"""The planted faults still apply to the code that they break, and there is one for every part of the product."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.mutants.fault import PRODUCT, ROOT, Fault, faults

FAULTS = faults()
PARKED = "tests/peers/megatron/parked/"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_applies_and_names_tests_that_exist(fault: Fault) -> None:
    done = subprocess.run(["git", "apply", "--check", fault.path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(file.partition("/")[0] in PRODUCT or file.startswith(PARKED) for file in fault.files)
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert (ROOT / file).exists(), test
        assert not name or f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), test


def test_every_part_has_a_planted_fault() -> None:
    # A topic of the core is a package, or a module of its own that decides something.
    core = {path.name for path in (ROOT / "mismatch_ext").iterdir() if (path / "__init__.py").exists()} - {
        "adapters",
        "patches",
    }
    core |= {"fingerprint.py", "recorder.py", "records.py", "stream.py", "versions.py"}
    parts = {f"mismatch_ext/{name}" for name in core}
    for folder in PRODUCT[1:]:
        parts |= {f"{folder}/{path.name}" for path in Path(ROOT, folder).iterdir() if (path / "__init__.py").exists()}
    broken = [file for fault in FAULTS for file in fault.files]
    assert len(FAULTS) >= 25
    assert not [part for part in parts if not any(file == part or file.startswith(f"{part}/") for file in broken)]
