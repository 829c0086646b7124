"""A stock `python -m sglang.launch_server` on this machine, in processes of its own, of the environment that has SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.peers.engines.served import answering
from tests.peers.engines.sglang_environment import HELD, MAIN, PYTHON, environment
from tests.rendezvous import free_port

# A CPU and small models need them. A scheduler that waits would take a core from the trainer's side.
FLAGS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph",
    "--mem-fraction-static", "0.5", "--max-total-tokens", "16384", "--grammar-backend", "none", "--skip-server-warmup",
    "--sleep-on-idle", "--log-level", "error", "--random-seed", "0",
)  # fmt: skip


@contextmanager
def serving(model: str | Path, folder: Path, *flags: str) -> Iterator[str]:
    """Run SGLang's server until the end of the block.

    Args:
        model: Folder of the checkpoint.
        folder: For its log, and the log of the kernel stub.
        flags: Beside those that a CPU and small models need.

    Yields:
        Its address.
    """
    assert PYTHON.exists(), f"{PYTHON} is missing: run `make setup`"
    port = free_port()
    command = [str(PYTHON), "-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), *FLAGS, *flags]
    # It swallows the signal to end once it has answered a request.
    log, told = folder / f"sglang-{port}.log", environment(HELD or MAIN, folder / f"stub-{port}.log")
    with answering(command, port, told, log, patience=2) as url:
        yield url
