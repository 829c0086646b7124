"""Names of the three compute dtypes, and the facts about them that the checks use."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mismatch_ext.errors import PrecisionError
from mismatch_ext.precision.names import ALIASES, NAMES, bare

_TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class DtypeFacts:
    """Limits of a floating-point dtype.

    Args:
        name: Canonical name.
        max: Largest finite value.
        smallest_normal: Smallest positive value with full relative precision.
        smallest_subnormal: Smallest positive value; a value of at most half of it rounds to zero.
        eps: Distance from 1 to the next larger value.
    """

    name: str
    max: float
    smallest_normal: float
    smallest_subnormal: float
    eps: float


def canonical(dtype: str | torch.dtype) -> str:
    """Return the canonical name of a compute dtype.

    Args:
        dtype: A torch dtype, or a name such as "fp16", "half", "torch.float16", "bf16" or "float32", in any
            case.

    Returns:
        "float32", "float16" or "bfloat16".

    Raises:
        PrecisionError: It is none of the three. "auto" is refused too, because the engine then chooses the
            dtype.
    """
    key = bare(dtype)
    if key not in ALIASES:
        raise PrecisionError(
            f"dtype {str(dtype)!r} is not a compute dtype; allowed: {', '.join(NAMES)} (or {', '.join(ALIASES)})."
        )
    return ALIASES[key]


def torch_dtype(name: str | torch.dtype) -> torch.dtype:
    """Return the torch dtype of a name or alias.

    Raises:
        PrecisionError: The name is no compute dtype.
    """
    return _TORCH[canonical(name)]


def facts(dtype: str | torch.dtype) -> DtypeFacts:
    """Return the limits of a dtype.

    Raises:
        PrecisionError: The name is no compute dtype.
    """
    name = canonical(dtype)
    info = torch.finfo(_TORCH[name])
    return DtypeFacts(
        name=name,
        max=info.max,
        smallest_normal=info.smallest_normal,
        smallest_subnormal=info.smallest_normal * info.eps,
        eps=info.eps,
    )


def coarser(first: str | torch.dtype, second: str | torch.dtype) -> str:
    """Return the dtype with the larger eps; it determines the gap between two sides that compute in these dtypes.

    Raises:
        PrecisionError: One of the two is no compute dtype.
    """
    return max(canonical(first), canonical(second), key=lambda name: facts(name).eps)
