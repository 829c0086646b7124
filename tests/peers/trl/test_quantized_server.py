"""TRL with a vLLM server that is quantized on purpose: as the block names it, it trains, and its updates are verified."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.peers.engines.vllm_server import serving
from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.trl import scenarios_server as scenarios
else:
    scenarios = named("tests.peers.trl.scenarios_server")

pytestmark = [pytest.mark.nightly, pytest.mark.engine]
FORMAT = "fp8_per_channel"
PRECISION = {"dtype": "bfloat16", "engine_weights": FORMAT}


def test_trl_trains_with_a_quantized_server_and_verifies_its_updates(run: Run, dense: Path, tmp_path: Path) -> None:
    """TRL trains with a vLLM server that quantizes each update; a block that names another format is refused with the flag."""
    flags = ["--dtype", "bfloat16", "--logprobs-mode", "processed_logprobs", "--quantization", FORMAT]
    flags += ["--weight-transfer-config", '{"backend": "mismatch_http"}']
    with serving(dense, tmp_path, *flags, development=True) as url:

        def train(name: str, precision: dict[str, Any]) -> Any:
            block = {"precision": precision, "correction": {"preset": "token_truncate"}}
            out = tmp_path / name
            return run(scenarios.train, timeout=300, fresh=True, model=dense, out=out, url=url, block=block)

        result = train("run", PRECISION).expect()
        other = train("other", PRECISION | {"engine_weights": "fp8"})
    print({name: value for name, value in result.items() if name != "history"})
    assert [status for status, *_ in result["verdicts"]] == ["unchanged", "in_sync", "in_sync"]
    assert result["engine"]["quantization"] == FORMAT
    assert "float8_e4m3fn" in result["engine"]["parameter_dtypes"]
    assert all(0 < step["mismatch/k3_kl"] < 0.1 for step in result["history"])
    assert other.code != 0 and "--quantization fp8 " in other.stderr and f"it has {FORMAT}" in other.stderr
