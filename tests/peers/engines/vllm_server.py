"""A stock `vllm serve` on this machine, in processes of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from tests.peers.engines.served import answering, free_port

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
    port = free_port()
    command = [sys.executable, "-c", COMMAND, "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", "256", "--enforce-eager", "--generation-config", "vllm", *flags]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": str(int(development)),
        "PYTHONPATH": os.pathsep.join([_named_vllm(folder), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }  # fmt: skip
    with answering(command, port, environment, folder / f"vllm-{port}.log") as url:
        yield url


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
