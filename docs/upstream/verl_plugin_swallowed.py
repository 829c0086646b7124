"""A plugin of verl's that fails to load is swallowed at DEBUG: the run goes on without it, and nothing is printed."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PEER = "verl"
REPORTED = "not reported"
WORKAROUND = "`load` (adapters/verl/plugin.py) says it of this package, and patch `verl/guard` ends a run with a block"
ALONE = True
EXPECTED = "says so"
BROKEN = {"METADATA": "Name: broken\nVersion: 1\n", "entry_points.txt": "[verl.plugins]\nbroken = no_such_module\n"}
OLD_VERL = {"METADATA": "Name: verl\nVersion: 0.1\n"}


def seen(message="no_such_module", name="broken-1", files=BROKEN) -> str:
    """Import verl beside a plugin whose module does not exist, and look for a word of it."""
    with tempfile.TemporaryDirectory() as folder:
        (info := Path(folder) / f"{name}.dist-info").mkdir()
        for file, content in files.items():
            (info / file).write_text(content)
        variables = {**os.environ, "PYTHONPATH": folder}
        done = subprocess.run([sys.executable, "-c", "import verl"], env=variables, capture_output=True, text=True)
    return "says so" if message in done.stdout + done.stderr else f"nothing, and exit status {done.returncode}"


def with_workaround() -> str:
    """Let this package fail to load, because verl's metadata says that it is too old."""
    return seen("mismatch-ext could not be loaded into verl", "verl-0.1", OLD_VERL)


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
