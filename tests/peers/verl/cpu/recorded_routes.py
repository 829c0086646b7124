"""Routes of engines on a CPU, which vLLM 0.31 and later record under Model Runner V2 alone; that one needs Triton.

The package makes up for it in engines of its own process. verl's engines are in others. Cheap to import.
"""

from __future__ import annotations

import functools
from typing import Any

from tests.peers.verl.cpu.after_import import AfterImport


def record_routes() -> None:
    """Do in every process what the package does for an engine of its own: let vLLM start, and feed its connector."""

    def allow(module: Any) -> None:
        from mismatch_ext.patches.vllm.cpu_routes import CPU_ROUTES

        config, name = module.VllmConfig, CPU_ROUTES.target.rpartition(".")[2]
        if hasattr(config, name):
            setattr(config, name, CPU_ROUTES.make(getattr(config, name)))

    def feed(module: Any) -> None:
        from mismatch_ext.adapters.vllm.cpu_routes import feed_connector

        original = module.CPUModelRunner.initialize_kv_cache

        @functools.wraps(original)
        def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            asked = getattr(self.vllm_config, "aux_output_config", None)
            is_profiling = kwargs.get("is_profiling", False)
            if asked is not None and asked.enabled and not is_profiling:
                feed_connector(self, self.vllm_config)

        module.CPUModelRunner.initialize_kv_cache = initialize_kv_cache

    AfterImport("vllm.config.vllm", allow)
    AfterImport("vllm.v1.worker.cpu_model_runner", feed)
