"""The fixture `evidence` writes down what README and docs quote."""

import datetime
import json
import subprocess
from collections.abc import Callable
from typing import Any

import cpuinfo
import pytest

from mismatch_ext.versions import installed
from tests.commands import ROOT

# By these, kernels of bfloat16 and float16 differ on CPUs of one name.
KERNELS = {"amx_bf16", "amx_fp16", "avx512_fp16", "avx512_bf16", "avx512f"}


@pytest.fixture
def evidence() -> Callable[[str, str, dict[str, Any]], None]:
    """Return `evidence(name, command, figures)`, which writes evidence/NAME.json; call it after the test's last assertion."""

    def write(name: str, command: str, figures: dict[str, Any]) -> None:
        cpu = cpuinfo.get_cpu_info()
        record = {
            "command": command,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "commit": subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip(),
            "cpu": [cpu.get("brand_raw"), *sorted(KERNELS & {*cpu.get("flags", ())})],
            "versions": {peer: installed(peer) for peer in ("torch", "transformers", "trl", "vllm")},
            "figures": figures,
        }
        (ROOT / f"evidence/{name}.json").write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")

    return write
