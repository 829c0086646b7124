"""A stock `vllm serve` on this machine, in processes of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

from tests.peers.engines.served import answering
from tests.rendezvous import free_port

COMMAND = "from vllm.entrypoints.cli.main import main; main()"


@contextmanager
def serving(
    model: str | Path,
    folder: Path,
    *flags: str,
    development: bool = False,
    port: int | None = None,
    plugins: str | None = None,
) -> Iterator[str]:
    """Run `vllm serve` until the end of the block.

    Args:
        model: Folder of the checkpoint.
        folder: For its log.
        flags: Beside those that a CPU and small models need.
        development: Whether it answers /server_info.
        port: Where it listens; None finds one that is free.
        plugins: Names of the plugins that vLLM may load; None lets it load all.

    Yields:
        Its address.
    """
    port = free_port() if port is None else port
    command = [sys.executable, "-c", COMMAND, "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", "256", "--enforce-eager", "--generation-config", "vllm", *flags]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": str(int(development)),
        "PYTHONPATH": os.pathsep.join([named_vllm(folder), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }  # fmt: skip
    environment |= {} if plugins is None else {"VLLM_PLUGINS": plugins}
    with answering(command, port, environment, folder / f"vllm-{port}.log") as url:
        yield url


def processes(url: str) -> list[int]:
    """Return the processes of a server on this machine, the first of which leads the others' group."""
    asked = f"--port\0{url.rpartition(':')[2]}\0".encode()
    found = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if asked in _read(path)]
    leader = next(pid for pid in found if os.getpgid(pid) == pid)
    below = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat") if _group(path) == leader]
    return [leader, *(pid for pid in below if pid != leader)]


def _read(path: Path) -> bytes:
    with suppress(OSError):
        return path.read_bytes()
    return b""


def _group(path: Path) -> int | None:
    fields = _read(path).rpartition(b")")[2].split()
    return int(fields[2]) if fields else None


def named_vllm(folder: Path) -> str:
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
