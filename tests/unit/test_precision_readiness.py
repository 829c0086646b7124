"""The readiness scan: exact counts at float16's edges, verdicts at thresholds, hooks without a trace."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mismatch_ext.errors import PrecisionError
from mismatch_ext.precision.readiness import ReadinessReport, TensorReadiness, scan_activations, scan_weights

pytestmark = pytest.mark.numeric


def scanned(*values: float, dtype: str = "float16") -> TensorReadiness:
    (result,) = scan_weights([("w", torch.tensor(values, dtype=torch.float32))], dtype)
    return result


def test_counts_at_the_edges_of_float16() -> None:
    result = scanned(
        0.0, 0.0,  # exact, and in no share
        65504.0, -1.0, 2**-14,  # largest, ordinary, smallest normal: fine
        2**-14 * (1 - 2**-12), 2**-24, 2**-25 * (1 + 2**-20),  # subnormal; the last rounds up to 2^-24
        2**-25, -(2**-30),  # a tie to even and less: zero
    )  # fmt: skip
    assert result.numel == 10
    assert (result.max_abs, result.headroom, result.overflow_frac) == (65504.0, 1.0, 0.0)
    assert (result.subnormal_frac, result.flush_frac) == (3 / 8, 2 / 8)


@given(st.lists(st.floats(width=32, min_value=-1e5, max_value=1e5), min_size=1, max_size=50))
@settings(max_examples=200, deadline=None)
def test_shares_agree_with_really_casting(values: list[float]) -> None:
    result = scanned(*values)
    wide = torch.tensor(values, dtype=torch.float32)
    half = wide.to(torch.float16)
    nonzero = max(int((wide != 0).sum()), 1)
    flushed = int(((half == 0) & (wide != 0)).sum())
    assert round(result.flush_frac * nonzero) == flushed
    # What lies between 65504 and 65520 still rounds down to 65504; the scan counts it as overflow already.
    assert round(result.overflow_frac * len(values)) == int((wide.abs() > 65504).sum()) >= int(half.isinf().sum())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_value_that_is_not_finite_is_overflow_in_every_dtype(bad: float, dtype: str) -> None:
    result = scanned(bad, 1.0, 2.0, 3.0, dtype=dtype)
    assert (result.max_abs, result.headroom, result.overflow_frac) == (math.inf, 0.0, 0.25)
    assert ReadinessReport(weights=[result], dtype=dtype).verdict == "not ready"


def test_infinity_stored_in_float16_is_seen_by_a_wider_dtype() -> None:
    # In float16 the largest float32 is infinity, and infinity <= infinity: comparing there finds nothing.
    (result,) = scan_weights([("w", torch.tensor([1.0, math.inf], dtype=torch.float16))], "float32")
    assert result.overflow_frac == 0.5


def test_integer_and_empty_tensors_are_passed_over() -> None:
    tensors = [("ids", torch.arange(3)), ("none", torch.zeros(0)), ("w", torch.zeros(2))]
    (zero,) = scan_weights(tensors)
    assert (zero.name, zero.max_abs, zero.headroom) == ("w", 0.0, math.inf)
    with pytest.raises(PrecisionError, match="fp8"):
        scan_weights(tensors, "fp8")


@pytest.mark.parametrize(
    ("values", "verdict", "reason"),
    [
        ([8188.0], "ready", ""),  # 65504 / 8
        ([8189.0], "risky", "within a factor 8"),
        ([65505.0], "not ready", "exceed 65504"),
        ([1e-6] + [1.0] * 9, "ready", ""),  # 10 % exactly
        ([1e-6] * 2 + [1.0] * 17, "risky", "subnormal in more than 10%"),
        ([1e-9] + [1.0] * 18, "risky", "round to zero in more than 5%"),
    ],
)
def test_thresholds(values: list[float], verdict: str, reason: str) -> None:
    report = ReadinessReport(weights=[scanned(*values)], dtype="float16")
    assert report.verdict == verdict and reason in " ".join(report.reasons)


class Gated(nn.Module):
    """A gated product that no module returns: 300 * 300 = 90000 goes into `down` only."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        self.unused = nn.Linear(2, 2)
        for layer, factor in ((self.up, 300.0), (self.gate, 300.0), (self.down, 1e-6)):
            nn.init.zeros_(layer.bias)
            with torch.no_grad():
                layer.weight.copy_(torch.eye(2) * factor)

    def forward(self, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        return {"out": (self.down(self.up(x) * self.gate(x)), torch.arange(3))}


def test_activations_between_modules_are_seen() -> None:
    model = Gated()
    found = scan_activations(model, lambda: model(torch.ones(1, 2)))
    result = {one.name: one for one in found}
    assert list(result) == ["up (in)", "up (out)", "gate (in)", "gate (out)", "down (in)", "down (out)"]
    assert result["up (out)"].max_abs == 300.0
    assert (result["down (in)"].max_abs, result["down (in)"].overflow_frac) == (90000.0, 1.0)
    report = ReadinessReport(weights=scan_weights(model.named_parameters()), activations=found, dtype="float16")
    assert report.verdict == "not ready"
    # Really computing in float16 agrees.
    with torch.autocast("cpu", dtype=torch.float16):
        assert not torch.isfinite(model(torch.ones(1, 2))["out"][0]).all()


def test_hooks_go_even_when_the_forward_fails() -> None:
    model = Gated()
    with pytest.raises(RuntimeError, match="shapes"):
        scan_activations(model, lambda: model(torch.ones(1, 5)))
    assert not any(module._forward_hooks for module in model.modules())


def test_scanning_nothing_is_an_error() -> None:
    with pytest.raises(PrecisionError, match="ran none of the 4 leaf modules of Gated"):
        scan_activations(Gated(), lambda: None)
    with pytest.raises(PrecisionError, match="nothing was scanned"):
        ReadinessReport(weights=[])


def test_a_sharded_parameter_is_scanned_by_its_shard() -> None:
    weight = torch.tensor([1.0, 1e30, 0.0, 1e-12])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = distribute_tensor(weight, init_device_mesh("cpu", (1,)), [Shard(0)])
        assert scan_weights([("w", sharded)], "float16") == scan_weights([("w", weight)], "float16")
    finally:
        dist.destroy_process_group()
