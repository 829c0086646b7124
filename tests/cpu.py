"""What this machine's CPU computes with, asked as vLLM and oneDNN ask it: a test that depends on it says which way it took."""

from __future__ import annotations

from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]


def has_fp8_cache() -> bool:
    """Tell whether vLLM has kernels for an fp8 KV cache here: they are compiled for AVX-512 alone."""
    return torch.cpu._is_avx512_supported()


def packs_linears(dtype: torch.dtype) -> bool:
    """Tell whether vLLM packs linear layers of a dtype here, after which no weight can be loaded into them one by one.

    vLLM asks its oneDNN for a product of that dtype and goes without packing when there is none. torch's oneDNN answers the same,
    without importing vLLM; tests of TRL's training compare the two with what an engine has packed.

    Args:
        dtype: float32, bfloat16 or float16.
    """
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return dtype == torch.float32 or bool(supported[dtype]())


def without_float16_packing() -> dict[str, str]:
    """Return the environment in which vLLM leaves float16 linear layers as they are, as on a CPU without float16 products."""
    if not packs_linears(torch.float16):
        return {}
    # What vLLM has compiled lies in a cache whose key knows nothing of this limit.
    cache = str(ROOT / ".cache/without_float16")
    return {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "ATEN_CPU_CAPABILITY": "avx512",
        "VLLM_CACHE_ROOT": f"{cache}/vllm",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
    }
