"""Let a CPU engine of vLLM 0.31 and later record routing; vLLM allows it only under Model Runner V2, which needs Triton."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import util
from typing import Any
from unittest import mock

from mismatch_ext.patching import Patch


def _make(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def verify(self: Any) -> None:
        from vllm.platforms import current_platform

        if not self.aux_output_config.enabled or not current_platform.is_cpu() or self.use_v2_model_runner:
            return original(self)
        # vLLM does not ask for a runner on a platform outside its tree, but still checks prefix caching and speculation.
        with mock.patch.object(type(current_platform), "is_out_of_tree", lambda self: True):
            return original(self)

    return verify


CPU_ROUTES = Patch(
    name="vllm/cpu_routes",
    peer="vllm",
    supports=">=0.31.0,<=0.32.0",
    target="vllm.config.vllm:VllmConfig._verify_aux_output_compatibility",
    make=_make,
    observed="each completion's routes are read; missing rows, and rows of zeros in all layers, are refused",
    upstream="https://github.com/vllm-project/vllm/blob/v0.31.0/vllm/config/vllm.py",
    reason=(
        "since vLLM 0.31 routes leave the engine through an auxiliary-output connector that Model Runner V2 alone feeds. V2 "
        "needs Triton, which a CPU engine has not, and with the V1 runner vLLM refuses the flag. `attach_cpu_routes` feeds the "
        "connector from V1. On a GPU the patch calls vLLM's own."
    ),
    not_covered="Speculative decoding, and engines that run in another process.",
    remove_when="vLLM's CPU engine runs Model Runner V2, or its V1 runner feeds the connector.",
)


def cpu_routes_patches() -> list[Patch]:
    """Return the patches to apply while a CPU engine that records routing is built; none for a vLLM without the connector."""
    return [CPU_ROUTES] if util.find_spec("vllm.distributed.aux_output_connector") else []
