"""A stock `vllm serve` on this machine, in processes of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

import requests

COMMAND = "from vllm.entrypoints.cli.main import main; main()"


@contextmanager
def serving(model: str | Path, folder: Path, *flags: str, development: bool = False) -> Iterator[str]:
    """Run `vllm serve` until the end of the block.

    Args:
        model: Folder of the checkpoint.
        folder: For its log.
        flags: Beside those that a CPU and small models need.
        development: Whether it answers /server_info.

    Yields:
        Its address.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-c", COMMAND, "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", "256", "--enforce-eager", "--generation-config", "vllm", *flags]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": str(int(development)),
        "PYTHONPATH": os.pathsep.join([_named_vllm(folder), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }  # fmt: skip
    log = folder / f"vllm-{port}.log"
    with log.open("w", encoding="utf-8") as written:
        server = subprocess.Popen(command, env=environment, stdout=written, stderr=written, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(url, server, log)
        yield url
    finally:
        # A group of its own: the server, its engine and its worker.
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            server.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


def _named_vllm(folder: Path) -> str:
    """Return a folder that gives the installed vLLM the name by which `vllm serve` asks for itself, which vllm-cpu has not."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        version = metadata.version("vllm-cpu") + "+cpu"
        info = folder / "named" / f"vllm-{version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", encoding="utf-8")
        return str(info.parent)
    return str(folder)


def _wait(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 360
    while time.monotonic() < until:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode}: {log.read_text()[-3000:]}")
        with suppress(requests.RequestException):
            if requests.get(f"{url}/health", timeout=5).ok:
                return
        time.sleep(0.5)
    raise RuntimeError(f"the server did not start: {log.read_text()[-3000:]}")
