"""The surrogate term: by hand, under the mask, padded, permuted, and in every dtype."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mismatch_ext.config import KlConfig
from mismatch_ext.errors import ConfigError, NonFiniteLogprobError, RecordError
from mismatch_ext.kl import kl_baseline, kl_penalty, kl_surrogate

pytestmark = pytest.mark.numeric

CONFIGS = [
    KlConfig(estimator=estimator, placement=placement, target=target, ratio=ratio, baseline=baseline, coef=0.5)
    for estimator, placement, target, ratio, baseline in itertools.product(
        ("k1", "k2", "k3", "abs"),
        ("loss", "reward", "both"),
        ("token", "sequence"),
        ("none", "token", "sequence"),
        ("none", "leave_one_out"),
    )
]
configs = st.sampled_from(CONFIGS)
seeds = st.integers(0, 10_000)


def draw(seed: int, rows: int = 4, length: int = 6, scale: float = 0.5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logprobs, ref_logprobs, behavior_logprobs [rows, length], and a mask with holes and an empty row or not."""
    generator = torch.Generator().manual_seed(seed)
    base = -1 - torch.rand(rows, length, generator=generator, dtype=torch.float64)
    ref, behavior = (base + scale * torch.randn(base.shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return base, ref, behavior, torch.rand(base.shape, generator=generator) < 0.7


def term_and_gradient(
    logprobs: Tensor, ref: Tensor, behavior: Tensor, mask: Tensor, config: KlConfig, **kwargs: Tensor
) -> tuple[Tensor, Tensor]:
    leaf = logprobs.detach().clone().requires_grad_()
    term = kl_surrogate(leaf, ref, mask, config, behavior_logprobs=behavior, **kwargs)
    return term.detach(), torch.autograd.grad(term.sum(), leaf)[0]


def close(first: tuple[Tensor, ...], second: tuple[Tensor, ...], tolerance: float = 1e-12) -> None:
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("placement", "target", "ratio", "baseline", "weights"),
    [
        # d = (0.2, -0.1), rho = (2, 3), prefix products c = (2, 6); k1: the path-wise gradient is the weight.
        ("loss", "sequence", "none", "none", (1, 1)),
        ("loss", "sequence", "token", "none", (2, 3)),
        ("loss", "sequence", "sequence", "none", (2, 6)),
        ("reward", "token", "none", "none", (0.2, -0.1)),
        ("reward", "token", "token", "none", (2 * 0.2, 3 * -0.1)),
        ("reward", "token", "sequence", "none", (2 * 0.2, 6 * -0.1)),
        ("reward", "sequence", "none", "none", (0.2 - 0.1, -0.1)),
        ("reward", "sequence", "token", "none", (2 * 0.1, 3 * -0.1)),
        ("reward", "sequence", "sequence", "none", (2 * 0.2 + 6 * -0.1, 6 * -0.1)),
        ("both", "sequence", "sequence", "none", (2 + 2 * 0.2 + 6 * -0.1, 6 + 6 * -0.1)),
        # The other row has d = (0.4, 0.6) and rho = 1 throughout, so its returns are (1.0, 0.6) for every ratio.
        ("reward", "sequence", "none", "leave_one_out", (0.1 - 1.0, -0.1 - 0.6)),
        ("reward", "sequence", "token", "leave_one_out", (2 * (0.1 - 1.0), 3 * (-0.1 - 0.6))),
        ("reward", "sequence", "sequence", "leave_one_out", (2 * 0.2 + 6 * -0.1 - 2 * 1.0, 6 * -0.1 - 6 * 0.6)),
        ("reward", "token", "token", "leave_one_out", (2 * (0.2 - 0.4), 3 * (-0.1 - 0.6))),
    ],
)
def test_gradients_by_hand(
    placement: str, target: str, ratio: str, baseline: str, weights: tuple[float, float]
) -> None:
    config = KlConfig(estimator="k1", placement=placement, target=target, ratio=ratio, baseline=baseline)  # type: ignore[arg-type]
    logprobs = torch.tensor([[-1.0, -2.0], [-1.0, -1.0]], dtype=torch.float64)
    ref = logprobs - torch.tensor([[0.2, -0.1], [0.4, 0.6]], dtype=torch.float64)
    behavior = logprobs - torch.tensor([[2.0, 3.0], [1.0, 1.0]], dtype=torch.float64).log()
    leaf = logprobs.requires_grad_()
    term = kl_surrogate(leaf, ref, torch.ones(2, 2), config, behavior_logprobs=behavior, coef=10.0)
    gradient = torch.autograd.grad(term.sum(), leaf)[0]
    assert gradient[0].tolist() == pytest.approx([10 * w for w in weights], rel=1e-12)
    # The value is coef * w * d whatever the placement.
    weight = {"none": (1, 1), "token": (2, 3), "sequence": (2, 6)}[ratio]
    assert term[0].tolist() == pytest.approx([10 * weight[0] * 0.2, 10 * weight[1] * -0.1], rel=1e-12)


def test_holes_are_no_actions() -> None:
    # Tokens 0 and 2 are actions, token 1 is a tool's output: returns 0.2 + 0.3 and 0.3; prefix products 2 and 2 * 3.
    logprobs = torch.zeros(1, 3, dtype=torch.float64)
    ref, behavior = -torch.tensor([[0.2, 9.0, 0.3]]).double(), -torch.tensor([[2.0, 50.0, 3.0]]).double().log()
    mask = torch.tensor([[1, 0, 1]])
    config = KlConfig(estimator="k1", placement="reward", ratio="sequence", coef=1.0)
    gradient = term_and_gradient(logprobs, ref, behavior, mask, config)[1]
    assert gradient[0].tolist() == pytest.approx([2 * 0.2 + 6 * 0.3, 0.0, 6 * 0.3], rel=1e-6)


def test_baseline_is_the_mean_of_the_others_of_the_group_at_the_same_action() -> None:
    # Row 1 is padded on the left; its first action belongs with the first actions of the others. Rows 0-2 are a group;
    # the third action exists in row 0 only, so it has no baseline; row 3 is alone.
    d = torch.tensor([[1.0, 2.0, 4.0], [99.0, 8.0, 16.0], [32.0, 99.0, 99.0], [64.0, 128.0, 99.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 0, 0], [1, 1, 0]])
    config = KlConfig(estimator="k1", placement="reward", target="token", baseline="leave_one_out", coef=1.0)
    zeros = torch.zeros_like(d)
    gradient = term_and_gradient(zeros, -d, zeros, mask, config, groups=torch.tensor([7, 7, 7, 2]))[1]
    want = [[1 - (8 + 32) / 2, 2 - 16, 4], [0, 8 - (1 + 32) / 2, 16 - 2], [32 - (1 + 8) / 2, 0, 0], [64, 128, 0]]
    assert gradient.tolist() == want


@settings(deadline=None, max_examples=150)
@given(configs, seeds, st.sampled_from([math.nan, math.inf, -math.inf, 1e30, -1e4]))
def test_nothing_under_the_mask_is_read(config: KlConfig, seed: int, garbage: float) -> None:
    logprobs, ref, behavior, mask = draw(seed)
    want = term_and_gradient(logprobs, ref, behavior, mask, config)
    dirty = [torch.where(mask, tensor, garbage) for tensor in (logprobs, ref, behavior)]
    got = term_and_gradient(dirty[0], dirty[1], dirty[2], mask, config)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert (got[0][~mask] == 0).all() and (got[1][~mask] == 0).all()


@settings(deadline=None, max_examples=100)
@given(configs, seeds, st.integers(0, 3), st.integers(0, 3))
def test_padding_on_either_side_changes_nothing(config: KlConfig, seed: int, left: int, right: int) -> None:
    tensors = draw(seed)
    want = term_and_gradient(*tensors, config)
    padded = [torch.nn.functional.pad(tensor, (left, right), value=math.nan) for tensor in tensors[:3]]
    mask = torch.nn.functional.pad(tensors[3], (left, right))
    got = term_and_gradient(padded[0], padded[1], padded[2], mask, config)
    kept = slice(left, left + tensors[3].shape[1])
    close(want, (got[0][:, kept], got[1][:, kept]))
    assert float(got[1].abs().sum()) == pytest.approx(float(want[1].abs().sum()), rel=1e-12)


@settings(deadline=None, max_examples=100)
@given(configs, seeds, st.permutations(range(4)))
def test_permuted_rows_permute_the_terms(config: KlConfig, seed: int, order: list[int]) -> None:
    tensors = draw(seed)
    want = term_and_gradient(*tensors, config)
    got = term_and_gradient(*(tensor[order] for tensor in tensors), config)  # type: ignore[arg-type]
    close((want[0][order], want[1][order]), got)


@settings(deadline=None, max_examples=150)
@given(configs, seeds, st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_every_dtype_gives_the_float64_result_of_its_own_values(
    config: KlConfig, seed: int, dtype: torch.dtype
) -> None:
    logprobs, ref, behavior, mask = draw(seed)
    low = [tensor.to(dtype) for tensor in (logprobs, ref, behavior)]
    term, gradient = term_and_gradient(low[0], low[1], low[2], mask, config)
    want, want_gradient = term_and_gradient(*(tensor.double() for tensor in low), mask, config)  # type: ignore[misc]
    assert (term.dtype, gradient.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(term.double(), want, rtol=1e-6, atol=1e-30)
    epsilon = torch.finfo(dtype).eps
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=epsilon, atol=epsilon / 100)


@settings(deadline=None, max_examples=100)
@given(configs, seeds, st.sampled_from([1e4, -1e4, 200.0, -200.0]), st.sampled_from([1e4, -1e4, 0.0]))
def test_extreme_values_stay_finite(config: KlConfig, seed: int, ref_gap: float, behavior_gap: float) -> None:
    logprobs, ref, behavior, mask = (t.float() if t.is_floating_point() else t for t in draw(seed))
    mask[0, 0] = True
    ref[0, 0], behavior[0, 0] = logprobs[0, 0] + ref_gap, logprobs[0, 0] + behavior_gap
    term, gradient = term_and_gradient(logprobs, ref, behavior, mask, config)
    assert torch.isfinite(term).all() and torch.isfinite(gradient).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["logprobs", "ref_logprobs", "behavior_logprobs"])
@pytest.mark.parametrize("function", [kl_surrogate, kl_penalty])
def test_an_unmasked_value_that_is_not_finite_is_named(function, name: str, bad: float) -> None:  # type: ignore[no-untyped-def]
    named = {key: torch.zeros(2, 3) for key in ("logprobs", "ref_logprobs", "behavior_logprobs")}
    named[name][1, 2] = bad
    reason = {"ref_logprobs": "infinite"} if bad == -math.inf else {}
    with pytest.raises(NonFiniteLogprobError, match=rf"{name}\[1, 2\] .*{bad}.*{reason.get(name, '')}"):
        function(
            named["logprobs"],
            named["ref_logprobs"],
            torch.ones(2, 3),
            KlConfig(coef=1.0),
            behavior_logprobs=named["behavior_logprobs"],
        )


def test_wrong_arguments_are_named() -> None:
    x, mask = torch.zeros(2, 3), torch.ones(2, 3)
    for config, message in (
        (KlConfig(), "mismatch.kl.coef is not set"),
        (KlConfig(coef=1.0, ratio="token"), "ratio='token' needs behavior_logprobs"),
        (KlConfig(coef=1.0, estimator="full"), "kl_full"),
    ):
        with pytest.raises(ConfigError, match=message):
            kl_surrogate(x, x, mask, config)
    with pytest.raises(ConfigError, match="coef nan"):
        kl_surrogate(x, x, mask, KlConfig(), coef=math.nan)
    config = KlConfig(coef=1.0, baseline="leave_one_out", placement="both")
    with pytest.raises(RecordError, match=r"mask \[2, 2\]"):
        kl_surrogate(x, x, mask[:, :2], config)
    with pytest.raises(RecordError, match="other than 0 and 1"):
        kl_surrogate(x, x, mask / 2, config)
    with pytest.raises(RecordError, match=r"groups \[3\]"):
        kl_surrogate(x, x, mask, config, groups=torch.zeros(3, dtype=torch.long))


def test_the_argument_coef_wins_over_the_configured_one() -> None:
    logprobs, ref, behavior, mask = draw(0)
    one = kl_surrogate(logprobs, ref, mask, KlConfig(coef=7.0), coef=1.0)
    assert torch.equal(one, kl_surrogate(logprobs, ref, mask, KlConfig(coef=1.0)))


def test_a_batch_without_a_token_is_all_zero() -> None:
    logprobs, ref, behavior, mask = draw(0)
    for config in CONFIGS:
        term, gradient = term_and_gradient(logprobs, ref, behavior, torch.zeros_like(mask), config)
        assert not term.any() and not gradient.any()


@given(configs.filter(lambda config: config.baseline == "leave_one_out" and config.placement != "loss"), seeds)
@settings(max_examples=40, deadline=None)
def test_a_baseline_from_outside_is_that_of_the_whole_batch(config: KlConfig, seed: int) -> None:
    logprobs, ref, behavior, mask = draw(seed)
    groups = torch.arange(len(mask)) % 2
    whole = term_and_gradient(logprobs, ref, behavior, mask, config, groups=groups)
    given = kl_baseline(logprobs, ref, mask, config, behavior_logprobs=behavior, groups=groups)
    # A row at a time, as a host does that spreads a prompt's responses over its micro-batches.
    rows = [
        term_and_gradient(*(x[i : i + 1] for x in (logprobs, ref, behavior, mask)), config, baseline=given[i : i + 1])
        for i in range(len(mask))
    ]
    close(whole, tuple(torch.cat(parts) for parts in zip(*rows, strict=True)))


def test_a_given_baseline_counts_and_not_under_the_mask() -> None:
    logprobs, ref, behavior, mask = draw(1)
    config = KlConfig(estimator="k1", coef=0.5)
    given = torch.full(mask.shape, 0.3).masked_fill(~mask, math.nan)
    plain = term_and_gradient(logprobs, ref, behavior, mask, config, baseline=given)
    none = term_and_gradient(logprobs, ref, behavior, mask, KlConfig(estimator="k1", coef=0.5, baseline="none"))
    torch.testing.assert_close(
        (none[1] - plain[1])[mask], torch.full_like(plain[1][mask], 0.5 * 0.3), rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize(
    ("baseline", "config", "error", "words"),
    [
        (torch.zeros(4, 6), KlConfig(coef=1.0, baseline="none"), ConfigError, "baseline='none'"),
        (torch.zeros(4, 5), KlConfig(coef=1.0), RecordError, r"baseline \[4, 5\]"),
        (torch.zeros(4, 6).long(), KlConfig(coef=1.0), RecordError, "baseline has dtype"),
        (torch.full((4, 6), math.nan), KlConfig(coef=1.0), NonFiniteLogprobError, r"baseline\["),
        (torch.full((4, 6), -math.inf), KlConfig(coef=1.0), NonFiniteLogprobError, r"baseline\["),
    ],
)
def test_a_baseline_that_does_not_fit_is_refused(
    baseline: Tensor, config: KlConfig, error: type[Exception], words: str
) -> None:
    logprobs, ref, _, mask = draw(0)
    with pytest.raises(error, match=words):
        kl_surrogate(logprobs, ref, mask, config, baseline=baseline)
