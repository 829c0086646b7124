"""Check that a vLLM server is what a run needs before anything is sent to it; an error says what to add to its command."""

from __future__ import annotations

from mismatch_ext.adapters.vllm.remote import RemoteEngine
from mismatch_ext.adapters.vllm.server.plugin import BACKEND

from mismatch_ext.config import MismatchConfig, PrecisionConfig
from mismatch_ext.errors import EngineError
from mismatch_ext.precision.audit import EngineReading
from mismatch_ext.precision.dtypes import spelled
from mismatch_ext.presets import resolve
from mismatch_ext.versions import installed

LOGPROBS = "processed_logprobs"


class ServerCheck:
    """Refuses a server with which the settings of a block cannot be kept.

    Args:
        block: The `mismatch` block.
    """

    def __init__(self, block: MismatchConfig) -> None:
        self.block = block

    def __call__(self, remote: RemoteEngine, device: str) -> None:
        """Check a server.

        Args:
            remote: The server.
            device: Type of the device that the trainer computes on.

        Raises:
            EngineError: It has to be started with other settings; names each flag, with the reason.
        """
        wanted = [*self._transfer(remote, device), *self._settings(remote)]
        if wanted:
            lines = "\n".join(f"  {flag}    {why}" for flag, why in wanted)
            raise EngineError(
                f"the vLLM server at {remote.http.url} (vLLM {remote.version}) does not run as the mismatch block needs it. "
                f"Restart it with this in its command:\n{lines}"
            )
        release = installed("mismatch-ext")
        if remote.plugin not in (None, release):
            raise EngineError(
                f"mismatch-ext {remote.plugin} runs in the vLLM server at {remote.http.url}, and {release} in the trainer; "
                "install one version in both, and restart the server."
            )
        if remote.plugin is None and self.block.precision is not None:
            raise EngineError(
                f"mismatch.precision with the vLLM server at {remote.http.url}, in which mismatch-ext does not run: the dtypes "
                "of its parameters and of its KV cache cannot be read back. Install mismatch-ext where the server runs (`pip "
                "install mismatch-ext`; VLLM_PLUGINS must not leave out 'mismatch'), and restart it."
            )
        replicas = remote.config["parallel_config"]["data_parallel_size"]
        if replicas > 1:
            raise EngineError(
                f"--data-parallel-size {replicas} of the vLLM server at {remote.http.url}: one replica alone can be read back, "
                "and the others would go unchecked; start it with --data-parallel-size 1."
            )

    def _transfer(self, remote: RemoteEngine, device: str) -> list[tuple[str, str]]:
        """Return the flags that are missing for weights to reach the server, with reasons."""
        backend = BACKEND if "cpu" in (device, remote.config["device_config"]["device"]) else "nccl"
        asked = f'--weight-transfer-config \'{{"backend": "{backend}"}}\''
        if remote.backend is None:
            return [(asked, "it takes no weights")]
        if backend == BACKEND and remote.backend != BACKEND:
            where = "; mismatch-ext must be installed where it runs" if remote.plugin is None else ""
            return [(asked, f"weights cannot reach it by {remote.backend!r} from or on a CPU{where}")]
        return []

    def _settings(self, remote: RemoteEngine) -> list[tuple[str, str]]:
        """Return the flags for those of the server's settings that are not as asked, with reasons."""
        flags, reading = [], remote.reading()
        if reading.logprobs_mode != LOGPROBS:
            flags.append((f"--logprobs-mode {LOGPROBS}", f"it reports {reading.logprobs_mode}, before the temperature"))
        precision = self.block.precision
        if precision is not None and spelled(reading.model_dtype) != precision.dtype:
            why = f"it computes in {reading.model_dtype}, and mismatch.precision.dtype is {precision.dtype!r}"
            flags.append((f"--dtype {precision.dtype}", why))
        if precision is not None and precision.head not in (None, reading.head_dtype):
            found = "cannot be read back" if reading.head_dtype is None else f"computes in {reading.head_dtype}"
            why = f"mismatch.precision.head is {precision.head!r}, and its output head {found}"
            flags.append((f'--hf-overrides \'{{"head_dtype": "{precision.head}"}}\'', why))
        if precision is not None:
            flags += self._quantized(precision, reading)
        flags += self._most_likely(remote)
        if self.block.routing is not None and self.block.routing.mode == "R3" and not remote.records_routing:
            flags.append(("--enable-return-routed-experts", "mismatch.routing.mode is 'R3', and it records no routes"))
        return flags

    def _most_likely(self, remote: RemoteEngine) -> list[tuple[str, str]]:
        """Return the flag by which the server reports as many likely tokens as score centering asks for, with the reason."""
        settings = None if self.block.correction is None else resolve(self.block.correction)
        if settings is None or settings.centering is None:
            return []
        most, top_k = remote.most_logprobs, settings.centering.top_k
        if most is None or most >= top_k:
            return []
        return [
            (
                f"--max-logprobs {top_k}",
                f"mismatch.correction.centering.top_k is {top_k}, and it reports {most} at most",
            )
        ]

    def _quantized(self, precision: PrecisionConfig, reading: EngineReading) -> list[tuple[str, str]]:
        """Return the flags for parts that are not quantized as asked, with reasons; the audit refuses what was not asked for."""
        flags = []
        if precision.engine_weights not in (None, reading.quantization):
            why = f"mismatch.precision.engine_weights, and it has {reading.quantization or 'none'}"
            flags.append((f"--quantization {precision.engine_weights}", why))
        if precision.engine_kv_cache is not None and reading.kv_cache_dtype not in precision.kv_cache_dtypes:
            why = f"mismatch.precision.engine_kv_cache, and it has {reading.kv_cache_dtype}"
            flags.append((f"--kv-cache-dtype {precision.engine_kv_cache}", why))
        return flags


def unchecked(remote: RemoteEngine) -> str | None:
    """Say what is not checked if a server runs without this package; None if it runs with it."""
    if remote.plugin is not None:
        return None
    return (
        f"mismatch-ext does not run in the vLLM server at {remote.http.url}: the dtypes of its parameters and its KV cache, and "
        "single tensors, are not read back; that it computes with the trainer's weights is told by probe tokens alone. Install "
        "mismatch-ext where the server runs, and restart it."
    )
