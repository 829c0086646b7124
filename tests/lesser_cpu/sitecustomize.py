"""Makes torch say of the CPU what `ONEDNN_MAX_CPU_ISA` allows, in every process that has this directory on its path.

oneDNN and torch's own kernels obey their variables. vLLM asks torch which of its libraries to load (AVX2, AVX-512, with
or without bfloat16 and AMX), and torch answers for the whole CPU.
"""

from __future__ import annotations

import os
from typing import Any

import wrapt

AVX2 = ("avx512", "avx512_bf16", "vnni", "amx_tile", "amx_fp16")
# Below AVX2 vLLM has no library: its own kernels stay those of AVX2, and torch's and oneDNN's are lesser.
LACKS = {"AVX512_CORE_BF16": ("amx_tile", "amx_fp16"), "AVX2": AVX2, "AVX": AVX2, "SSE41": AVX2}


@wrapt.when_imported("torch.cpu")
def limit(module: Any) -> None:
    """Let the questions after what a lesser machine lacks be answered with no."""
    for name in LACKS.get(os.environ.get("ONEDNN_MAX_CPU_ISA", ""), ()):
        setattr(module, f"_is_{name}_supported", lambda: False)
