"""Sampling-mask replay: storage, log-probabilities over a support and their gradient, and the toy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mismatch_ext import sampling_mask
from mismatch_ext.config import MismatchConfig, SamplingMaskConfig
from mismatch_ext.errors import ConfigError, NonFiniteLogprobError, RecordError
from mismatch_ext.loop import check_block
from mismatch_ext.rollout import SamplingSettings, to_records
from mismatch_ext.sampling_mask import TokenSupport, head_logprobs, support_logprobs
from tests.unit import sglang_recorded

pytestmark = pytest.mark.numeric
ALL_THREE = SamplingSettings(temperature=0.8, top_p=0.9, top_k=8, min_p=0.05)


def normal(*shape: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of_mask(mask: Tensor) -> TokenSupport:
    return TokenSupport.from_lists([row.nonzero()[:, 0].tolist() for row in mask], mask.shape[1])


def dense(support: TokenSupport) -> Tensor:
    mask = torch.zeros(len(support), support.vocabulary, dtype=torch.bool)
    for row in range(len(support)):
        mask[row, support.slice(row, row + 1).ids.long()] = True
    return mask


def left(logits: Tensor, sampling: SamplingSettings) -> Tensor:
    """The tokens that min-p, top-k and then top-p leave `[N, V]`."""
    p = (logits / sampling.temperature).softmax(-1)
    mask = p >= sampling.min_p * p.amax(-1, keepdim=True)
    if sampling.top_k:
        mask &= p >= p.topk(sampling.top_k).values[:, -1:]
    p = p * mask
    ordered, order = (p / p.sum(-1, keepdim=True)).sort(-1, descending=True)
    better = torch.zeros_like(p).scatter(-1, order, ordered.cumsum(-1) - ordered)
    return mask & (better < sampling.top_p)


def drawn(logits: Tensor, mask: Tensor, seed: int = 1) -> Tensor:
    """One token of each row's support, drawn from the renormalized policy."""
    p = logits.masked_fill(~mask, -math.inf).softmax(-1)
    return torch.multinomial(p, 1, generator=torch.Generator().manual_seed(seed))[:, 0]


def naive(logits: Tensor, tokens: Tensor, mask: Tensor, temperature: float = 1.0) -> Tensor:
    """The definition over a dense mask, as a float64 oracle; 0 where nothing was sampled."""
    z = (logits.double() / temperature).masked_fill(~mask, -math.inf)
    logp = z.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    return torch.where(mask.any(-1), logp, 0.0)


rows_of_ids = st.lists(st.lists(st.integers(0, 40), unique=True, max_size=9), min_size=1, max_size=7)


@given(rows_of_ids, st.data())
def test_storage_keeps_every_position(rows: list[list[int]], data: st.DataObject) -> None:
    support = TokenSupport.from_lists(rows, 41)
    assert dense(support).equal(dense(of_mask(dense(support))))
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    ids, held = support.rows(start, stop, torch.device("cpu"))
    assert [sorted(row) for row in rows[start:stop]] == [i[h].tolist() for i, h in zip(ids, held, strict=True)]
    whole = TokenSupport.joined([support.slice(0, start), support.slice(start, stop), support.slice(stop, len(rows))])
    assert dense(whole).equal(dense(support))
    assert (
        dense(support.padded(9))[: len(rows)].equal(dense(support)) and not dense(support.padded(9))[len(rows) :].any()
    )


def test_ids_and_tokens_that_cannot_be_are_named() -> None:
    with pytest.raises(RecordError, match=r"rollout a, token 1: .* id 7; allowed: 0 to 6"):
        TokenSupport.from_lists([[0], [7]], 7, "a")
    with pytest.raises(RecordError, match=r"token 0: .* twice"):
        TokenSupport.from_lists([[3, 3]], 7, "a")
    support = TokenSupport.from_lists([[0, 2], [], [5]], 7)
    support.check_sampled([2, 6, 5], [True, False, True], "b")
    with pytest.raises(RecordError, match=r"rollout b, token 2 \(id 2\): not among the 1 tokens"):
        support.check_sampled([2, 6, 2], [True, False, True], "b")
    with pytest.raises(RecordError, match="2 response tokens and sampling masks of 3 positions"):
        support.check_sampled([2, 6], [True, True], "b")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 100, 1 << 22])
def test_value_and_gradient_are_those_of_a_dense_mask(
    monkeypatch: pytest.MonkeyPatch, temperature: float, chunk: int
) -> None:
    monkeypatch.setattr(sampling_mask, "CHUNK", chunk)  # ids of a chunk
    logits = normal(2, 5, 30).requires_grad_()
    mask = normal(2, 5, 30, seed=3) > 1.5
    mask[..., 4] = True
    mask[1, 3:] = False  # padding
    flat = mask.flatten(0, 1)
    tokens = drawn(logits.detach().flatten(0, 1), flat | ~flat.any(-1, keepdim=True)).view(2, 5)
    support = of_mask(flat)
    ours = support_logprobs(logits, tokens, support, temperature=temperature)
    filled = mask | ~mask.any(-1, keepdim=True)
    theirs = torch.where(mask.any(-1), naive(logits, tokens, filled, temperature), 0.0)
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)
    outer = normal(2, 5, seed=9)
    (a,), (b,) = (torch.autograd.grad((one * outer).sum(), logits) for one in (ours, theirs))
    assert torch.allclose(a, b, rtol=1e-10, atol=1e-13) and not a[1, 3:].any()


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("biased", [False, True])
def test_the_head_gives_what_its_logits_give(softcap: float | None, biased: bool) -> None:
    hidden = normal(6, 4, seed=1).requires_grad_()
    weight = normal(25, 4, seed=2, scale=0.7).requires_grad_()
    bias = normal(25, seed=4).requires_grad_() if biased else None
    inputs = [one for one in (hidden, weight, bias) if one is not None]

    def logits() -> Tensor:
        z = 1.5 * (hidden @ weight.T + (0 if bias is None else bias))
        return z if softcap is None else softcap * torch.tanh(z / softcap)

    support = of_mask(left(logits().detach(), ALL_THREE))
    tokens = drawn(logits().detach(), dense(support))
    ours = lambda h, w, b=None: head_logprobs(  # noqa: E731
        h, w, b, tokens, support, temperature=0.8, scale=1.5, softcap=softcap
    )
    theirs = support_logprobs(logits(), tokens, support, temperature=0.8)
    assert torch.allclose(ours(*inputs), theirs, rtol=1e-12, atol=1e-14)
    outer = normal(6, seed=9)
    for a, b in zip(
        *(torch.autograd.grad((one * outer).sum(), inputs) for one in (ours(*inputs), theirs)), strict=True
    ):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
    assert torch.autograd.gradcheck(ours, inputs)


def test_float32_is_close_to_the_truth_far_from_zero() -> None:
    logits = normal(200, 500, scale=3.0) + 50
    support = of_mask(left(logits, SamplingSettings(top_p=0.95)))
    tokens = drawn(logits, dense(support))
    truth = naive(logits, tokens, dense(support))
    assert float((support_logprobs(logits.float(), tokens, support) - truth).abs().max()) < 5e-5


def test_what_does_not_fit_is_refused() -> None:
    logits, support = normal(2, 5), TokenSupport.from_lists([[0, 1], [2]], 5)
    with pytest.raises(RecordError, match=r"token 1 \(id 3\): not among the 1 tokens"):
        support_logprobs(logits, torch.tensor([0, 3]), support)
    with pytest.raises(RecordError, match="2 positions"):
        head_logprobs(normal(3, 4), normal(5, 4), None, torch.tensor([0, 2, 2]), support)
    logits[0, 1] = math.nan
    with pytest.raises(NonFiniteLogprobError, match=r"position \[0\]"):
        support_logprobs(logits, torch.tensor([0, 2]), support)


# What an engine's most likely tokens tell.


def test_the_support_of_top_logprobs_is_exact_or_refused() -> None:
    cut = -math.inf
    found = TokenSupport.from_top([[5, 2, 9], [1, 0, 2]], [[-0.1, -2.0, cut], [0.0, cut, cut]], asked=3, vocabulary=10)
    assert dense(found).nonzero().tolist() == [[0, 2], [0, 5], [1, 1]]
    of_all = [[4, 5, 6]], [[-1.0, -1.0, -1.1]]
    with pytest.raises(
        RecordError, match=r"rollout 4, token 0: at least 3 tokens .* asked for 3: .*max_support above 3"
    ):
        TokenSupport.from_top(*of_all, asked=3, vocabulary=10, name="4")
    with pytest.raises(RecordError, match="no token that could be sampled"):
        TokenSupport.from_top([[1, 2]], [[cut, None]], asked=2, vocabulary=10)


# The bias of the policy gradient, by enumeration of all responses.


# The section, and records.


def test_how_many_tokens_the_engine_is_asked_for() -> None:
    asked = lambda sampling, **given: SamplingMaskConfig(**given).asked(SamplingSettings(**sampling))  # noqa: E731
    assert asked({"top_k": 8, "top_p": 0.9}) == 24 and asked({"top_p": 0.9}, max_support=100) == 100
    for sampling, words in (({}, "nothing is cut off"), ({"min_p": 0.1}, "max_support is absent.* min_p=0.1")):
        with pytest.raises(ConfigError, match=words):
            asked(sampling)


def test_hosts_without_replay_refuse_the_section() -> None:
    block = MismatchConfig.parse({"sampling_mask": {}})
    assert block is not None and "sampling_mask" in block.features
    with pytest.raises(ConfigError, match=r"mismatch.sampling_mask in your own loop.*support_logprobs"):
        check_block(block)


def test_a_record_refuses_a_token_that_was_not_left() -> None:
    provenance = sglang_recorded.provenance(sampling=SamplingSettings(top_k=2))
    good, wrong = (TokenSupport.from_lists([[3, 4], [5, last]], 7) for last in (6, 4))
    rows: Any = {"prompt_ids": [[1]], "response_ids": [[3, 6]], "rollout_logprobs": [[-0.5, -0.5]]}
    (record,) = to_records(**rows, provenance=provenance, supports=[good])
    assert record.support is good
    (record,) = to_records(**rows, provenance=provenance, supports=[wrong])
    assert record.support is None and record.fault is not None and record.fault.reason == "mask"
