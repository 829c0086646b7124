"""Named sums: merging parts, and adding them over ranks by one all-reduce."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mismatch_ext.sums import Sums, merged, moments, over_ranks

pytestmark = pytest.mark.numeric


class Sharing:
    """A rank of several whose sums over ranks are done by hand: `start` collects, `end` answers."""

    def __init__(self, rank: int, size: int, total: Tensor | None = None) -> None:
        self.rank, self.size, self.total = rank, size, total
        self.calls: list[Tensor] = []

    def gather(self, value: Any) -> list[Any]:
        raise NotImplementedError

    def sum(self, values: Tensor) -> Tensor:
        self.calls.append(values)
        return values if self.total is None else self.total


def sums_of(x: Tensor, keys: Tensor) -> Sums:
    """Return one entry of each kind for samples `[2, n]`."""
    rows = torch.stack([keys, x[0]], 1)[keys.argsort()[:3]]
    filled = torch.cat([rows, torch.full((3 - len(rows), 2), torch.inf, dtype=torch.float64)])
    return {
        "all/added": x.sum(1),
        "max:one": torch.cat([x[0], x.new_tensor([-torch.inf])]).max(),
        "all/logsumexp:one": x[0].logsumexp(0),
        "smallest:rows": filled,
        "moments:both": moments(x),
    }


def parts(*counts: int) -> tuple[list[Sums], Sums]:
    """Return the sums of parts with so many samples each, and those of all samples together."""
    generator = torch.Generator().manual_seed(sum(counts))
    x = 0.999 + 1e-7 * torch.randn(2, sum(counts), generator=generator, dtype=torch.float64)
    keys = torch.rand(sum(counts), generator=generator, dtype=torch.float64)
    cut = [sums_of(a, b) for a, b in zip(x.split(counts, 1), keys.split(counts), strict=True)]
    return cut, sums_of(x, keys)


def assert_same(a: Sums, b: Sums) -> None:
    assert list(a) == list(b)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-7, atol=1e-20 if "moments" in name else 0.0)


@pytest.mark.parametrize("counts", [(4, 9, 2), (0, 5), (1, 0, 0), (0, 0)])
def test_merged_parts_are_the_whole(counts: tuple[int, ...]) -> None:
    cut, whole = parts(*counts)
    assert_same(merged(*cut), whole)
    assert_same(merged(*reversed(cut)), whole)


@pytest.mark.parametrize("counts", [(4, 9, 2), (0, 5), (0, 0), (6,)])
def test_ranks_add_up_by_one_all_reduce(counts: tuple[int, ...]) -> None:
    cut, whole = parts(*counts)
    sent = [Sharing(rank, len(cut)) for rank in range(len(cut))]
    for mine, ranks in zip(cut, sent, strict=True):
        over_ranks(mine, ranks)
    calls = [call for ranks in sent for call in ranks.calls]
    assert len(calls) == (len(cut) if len(cut) > 1 else 0)
    total = torch.stack(calls).sum(0) if calls else None
    for rank, mine in enumerate(cut):
        assert_same(over_ranks(mine, Sharing(rank, len(cut), total)), whole)


def test_moments_of_alike_values_do_not_cancel() -> None:
    cut, whole = parts(500, 700)
    _, _, _, *products = merged(*cut)["moments:both"].tolist()
    assert products == pytest.approx(whole["moments:both"][3:].tolist(), rel=1e-7)
    assert products[0] / 1200 == pytest.approx(1e-14, rel=0.2)
