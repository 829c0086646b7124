"""What of an optimizer step reaches an engine of a coarser dtype: counted element by element, over ranks, and warned of."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor, nn

from mismatch_ext.precision.audit import EngineReading, TrainerReading
from mismatch_ext.precision.grid import ELEMENTS, GridWatch, grid_metrics, grid_sums, sampled


def to_bfloat16(x: float) -> int:
    """Return the 16 bits of the nearest bfloat16, ties to even, by integer arithmetic on the float32's bits."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) & 0xFFFF


def stepped(seed: int, rate: float, n: int = 500) -> tuple[Tensor, Tensor]:
    """Return elements before and after a step, some of which stay."""
    random = torch.Generator().manual_seed(seed)
    before = torch.randn(n, generator=random) * 0.02
    return before, before + rate * torch.randint(-1, 2, (n,), generator=random)


@pytest.mark.parametrize("rate", [1e-6, 1e-2])
def test_the_share_is_that_of_a_loop_over_elements(rate: float) -> None:
    before, after = stepped(0, rate)
    pairs = [(a, b) for a, b in zip(before.tolist(), after.tolist(), strict=True) if a != b]
    moved = sum(to_bfloat16(a) != to_bfloat16(b) for a, b in pairs)
    sums = grid_sums(before, after, "float32", "bfloat16")
    assert {name: float(count) for name, count in sums.items()} == {"changed": len(pairs), "moved": moved}
    assert grid_metrics(sums) == {"engine_moved_frac": moved / len(pairs)}


def test_a_finer_engine_gets_more_and_one_of_the_same_dtype_all() -> None:
    before, after = stepped(1, 1e-6)
    shares = [
        grid_metrics(grid_sums(before, after, "float32", dtype))["engine_moved_frac"]
        for dtype in ("bfloat16", "float16", "float32")
    ]
    assert 0 < shares[0] < shares[1] / 2 and shares[1] < shares[2] == 1
    # What the trainer's own rounding hides is no change that the engine lacks.
    assert grid_metrics(grid_sums(before, after, "bfloat16", "bfloat16"))["engine_moved_frac"] == 1


def test_a_sample_is_of_all_trainable_parameters() -> None:
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 256), nn.Linear(512, 512))
    model[2].requires_grad_(False)
    named = dict(model.named_parameters()) | {"lora_A.weight": nn.Parameter(torch.full((4096,), 7.0))}
    elements = sampled(named.items())
    assert len(elements) == pytest.approx(ELEMENTS, rel=0.2) and not (elements == 7).any()
    first = len(range(0, 512 * 512, 7))
    assert torch.equal(elements[:first], model[0].weight.flatten()[::7].detach())


@pytest.mark.parametrize(
    ("parameters", "autocast", "engine", "watches"),
    [
        ("float32", None, "bfloat16", True),
        ("float32", "bfloat16", "bfloat16", False),
        ("float32", None, "float32", False),
        ("bfloat16", None, "bfloat16", False),
        ("float32", None, "unknown", False),
    ],
)
def test_a_run_is_watched_where_the_engine_is_coarser(
    parameters: str, autocast: str | None, engine: str, watches: bool
) -> None:
    trainer = TrainerReading(
        parameter_dtypes={parameters: 10}, autocast_dtype=autocast, scaler=None, reduce_dtype=None, device="cpu"
    )
    side = EngineReading(
        engine="vllm", version="1", model_dtype=engine, parameter_dtypes={}, kv_cache_dtype="auto", logprobs_mode="",
        quantization=None,
    )  # fmt: skip
    assert (GridWatch.of(trainer, side) is not None) == watches
