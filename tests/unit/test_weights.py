"""Judgments of weight updates: published failures are caught, published numerics are not, in all three dtypes."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from mismatch_ext.states import from_json, to_json
from mismatch_ext.weights import (
    CEILING,
    FLOOR,
    OUTPUT_HEAD,
    SAMPLED_ROWS,
    BitSums,
    Decoded,
    History,
    Limits,
    Look,
    Piece,
    SyncVerdict,
    TensorComparison,
    added,
    begin_history,
    compare_sums,
    decode_look,
    fingerprint,
    judge_decode,
    judge_prefill,
    sums_of,
)

pytestmark = pytest.mark.numeric

DTYPES = ("float32", "float16", "bfloat16")
NUMERICS = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1.5e-2}


SAME = TensorComparison(name="embed.weight", equal=True, max_abs_diff=0.0)
OLD = TensorComparison(name="norm.weight", equal=False, max_abs_diff=1e-3, matches_previous=True)
OTHER = TensorComparison(name="lm_head.weight", equal=False, max_abs_diff=0.7, matches_previous=False)
NAN = TensorComparison(name="embed.weight", equal=False, max_abs_diff=float("nan"))
HEAD = TensorComparison(name=OUTPUT_HEAD, equal=False, max_abs_diff=0.4)
UNKNOWN = TensorComparison(name="embed.weight", equal=False, max_abs_diff=None)


def probes(seed: int, spread: float = 1.0) -> Tensor:
    """Log-probabilities [8, 32] of some trainer version."""
    return -10 + spread * torch.randn(8, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def noisy(values: Tensor, gap: float, seed: int = 99) -> Tensor:
    """Return values at a mean distance of exactly `gap`."""
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values + noise * (gap / noise.abs().mean())


class Prefill:
    """A history of judgments of prefill."""

    def __init__(self, dtype: str) -> None:
        self.dtype, self.history = dtype, History()

    def begin(self, engine: Tensor, trainer: Tensor) -> None:
        self.history = begin_history(self.history, Look(engine=engine, reference=trainer))

    def judge(
        self, engine: Tensor, trainer: Tensor, *comparisons: TensorComparison, changed: bool = True
    ) -> SyncVerdict:
        look = Look(engine=engine, reference=trainer)
        self.history, verdict = judge_prefill(
            self.history, look, Limits(dtype=self.dtype), changed=changed, comparisons=comparisons
        )
        return verdict


def started(dtype: str, gap: float | None = None) -> tuple[Prefill, Tensor]:
    """Return a history with a baseline and a first good update, and the trainer's probes."""
    check, trainer = Prefill(dtype), probes(0)
    gap = NUMERICS[dtype] if gap is None else gap
    check.begin(noisy(trainer, gap, 1), trainer)
    assert check.judge(noisy(trainer, gap, 2), trainer, changed=False).status == "unchanged"
    return check, trainer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reproducible", [True, False])
def test_an_engine_that_keeps_old_weights_is_stale(dtype: str, reproducible: bool) -> None:
    check, trainer = started(dtype)
    engine = noisy(trainer, NUMERICS[dtype], 2 if reproducible else 4)
    verdict = check.judge(engine, noisy(trainer, 5 * NUMERICS[dtype] if dtype != "float32" else 1e-3, 3))
    assert verdict.status == "stale" and "The update did not reach" in verdict.message
    assert ("did not change at all" in verdict.message) is reproducible


def test_small_steps_add_up_to_stale() -> None:
    # Each step moves the probes by 5e-3, below bfloat16's movement floor of max(8e-3, baseline 1.5e-2).
    check, trainer = started("bfloat16")
    engine = noisy(trainer, 1.5e-2, 2)
    statuses = [check.judge(engine, trainer + 5e-3 * step).status for step in range(1, 6)]
    # 5e-3, 1e-2 and 1.5e-2 do not exceed the floor; 2e-2 does. (1.5e-2 in binary is a tie up to rounding.)
    assert statuses[:2] == ["in_sync", "in_sync"] and statuses[3:] == ["stale", "stale"]


def test_weights_lost_in_sleep_mode_are_not_numerics() -> None:
    # huggingface/trl issue 5312: 0.015 healthy, 0.201 after the engine slept.
    check, trainer = started("bfloat16", gap=0.015)
    moved = noisy(trainer, 0.02, 5)
    assert check.judge(noisy(moved, 0.018, 6), moved).ok
    again = noisy(moved, 0.02, 7)
    verdict = check.judge(noisy(again, 0.201, 8), again)
    assert verdict.status == "garbled" and verdict.threshold == pytest.approx(0.15, rel=0.01)


# Mean gaps measured between vLLM and transformers with the same weights, dense and MoE, by dtype.
@pytest.mark.parametrize(
    "gaps",
    [(1.05e-7, 9.12e-5, 6.91e-4), (7.06e-6, 6.68e-3, 5.22e-2), (4.1e-6, 1.84e-2, 0.204)],
)
@pytest.mark.parametrize("column", range(3))
def test_measured_numerics_are_in_sync_even_without_a_baseline(gaps: tuple[float, ...], column: int) -> None:
    check = Prefill(DTYPES[column])
    for step in range(3):
        # The gap of a model in training varies; three times the first is still numerics.
        verdict = check.judge(noisy(probes(step), gaps[column] * (1 + step), step), probes(step))
        assert verdict.status == "in_sync", verdict.message


def test_the_smaller_gap_before_or_after_the_first_update_is_the_baseline() -> None:
    # The trainer's model is not the checkpoint on disk, so the engine agrees only after the first update.
    check = Prefill("float16")
    check.begin(probes(7), probes(0))
    first = check.judge(noisy(probes(0), 2e-3), probes(0), changed=False)
    assert (first.status, first.baseline) == ("unchanged", pytest.approx(2e-3))
    assert check.judge(noisy(probes(1), 3e-2), probes(1)).status == "garbled"


def test_a_first_update_that_garbles_is_no_baseline() -> None:
    check = Prefill("bfloat16")
    check.begin(noisy(probes(0), 1e-3), probes(0))
    assert check.judge(noisy(probes(0), 0.3), probes(0), changed=False).status == "garbled"
    assert check.judge(noisy(probes(1), 0.3), probes(1)).status == "garbled"


def systematic(trainer: Tensor, gap: float) -> Tensor:
    """Return the scores of an engine that computes another function: its error depends on the tokens, not on chance."""
    return noisy(trainer, gap, 31)


def test_sides_that_were_apart_before_any_update_are_not_garbled_by_one() -> None:
    # Gemma-2 under an attention without its soft cap: 0.383 nats in float32, before the first update and after it.
    check, trainer = Prefill("float32"), probes(0)
    check.begin(systematic(trainer, 0.383), trainer)
    first = check.judge(systematic(trainer, 0.383), trainer, changed=False)
    assert first.status == "apart" and not first.ok
    for step in range(1, 6):  # the weights move, and so does what the engine makes of them
        trainer = noisy(trainer, 0.05, step)
        check.history = from_json(History, json.loads(json.dumps(to_json(check.history))), "weight_sync")
        later = check.judge(systematic(trainer, 0.383) + 0.1 * step * (trainer + 10), trainer, SAME)
        assert later.status == "apart", later.message


def test_an_update_that_garbles_sides_which_were_apart_before_is_named() -> None:
    check, trainer = Prefill("float32"), probes(0)
    check.begin(systematic(trainer, 0.383), trainer)
    assert check.judge(systematic(trainer, 0.383), trainer, changed=False).status == "apart"
    moved = noisy(trainer, 0.05, 5)
    again = copy.deepcopy(check)
    assert check.judge(noisy(moved, 0.383, 6), moved).status == "garbled"
    assert again.judge(systematic(moved, 0.383), moved, OTHER).status == "garbled"


@pytest.mark.parametrize("dtype", DTYPES)
def test_floor_and_ceiling(dtype: str) -> None:
    for factor, status in ((1.1, "garbled"), (0.9, "in_sync")):
        assert Prefill(dtype).judge(noisy(probes(0), CEILING[dtype] * factor), probes(0)).status == status
    check = Prefill(dtype)
    check.begin(probes(0), probes(0))
    for step, (factor, status) in enumerate(((0.9, "in_sync"), (1.1, "garbled")), start=1):
        verdict = check.judge(noisy(probes(step), FLOOR[dtype] * factor), probes(step))
        assert (verdict.status, verdict.threshold) == (status, FLOOR[dtype])


def test_the_baseline_grows_with_the_logits() -> None:
    # A policy four times as sharp has four times the rounding error: 12 baselines are 3 of the scaled ones.
    check, _ = started("float16", gap=2e-3)
    assert check.judge(noisy(probes(1), 2.4e-2), probes(1)).status == "garbled"
    sharp = 4 * probes(1)
    verdict = check.judge(noisy(sharp, 2.4e-2), sharp)
    assert verdict.status == "in_sync"
    assert verdict.baseline == pytest.approx(8e-3, rel=0.15)  # the spread of a sample varies a little


def test_log_probabilities_that_are_not_finite_are_garbled_and_not_remembered() -> None:
    check, trainer = started("float16")
    broken = noisy(trainer, 1e-3)
    broken[2, 3], broken[0, 0] = float("nan"), float("-inf")
    verdict = check.judge(broken, trainer)
    assert verdict.status == "garbled" and "2 of 256 engine log-probabilities are not finite" in verdict.message
    json.dumps(to_json(check.history), allow_nan=False)
    assert check.judge(noisy(trainer, 1e-3), trainer, changed=False).ok


@pytest.mark.parametrize(
    ("comparisons", "status", "text"),
    [
        ((SAME,), "in_sync", "1 tensors are equal bit by bit"),
        ((SAME, OLD), "stale", "1 of 2 tensors differ from the trainer's, such as norm.weight by 0.001. 1 are"),
        ((SAME, OTHER), "garbled", "such as lm_head.weight by 0.7."),
        ((OTHER, NAN), "garbled", "such as embed.weight by nan"),
        ((SAME, UNKNOWN), "garbled", "such as embed.weight."),
        ((SAME, HEAD), "garbled", "The output head does not compute with the weights that it holds; 1 other tensors are"),
        ((SAME, replace(HEAD, equal=True)), "in_sync", "1 tensors are equal bit by bit"),
    ],
)  # fmt: skip
def test_exact_comparisons_decide_below_the_numeric_floor(
    comparisons: tuple[TensorComparison, ...], status: str, text: str
) -> None:
    check, trainer = started("bfloat16")
    moved = trainer + 1e-5
    verdict = check.judge(noisy(moved, 1.5e-2, 11), moved, *comparisons)
    assert verdict.status == status and text in verdict.message


def test_a_tiny_change_under_a_coarse_dtype_is_seen_by_tensors_alone() -> None:
    check, trainer = started("bfloat16")
    engine, moved = noisy(trainer, 1.5e-2, 2), trainer + 1e-5
    assert copy.deepcopy(check).judge(engine, moved).status == "in_sync"
    assert check.judge(engine, moved, UNKNOWN).status == "stale"


# Decode.

NOISE = {"float32": 3e-7, "float16": 5e-4, "bfloat16": 8e-3}
STEP = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}
TOKENS = torch.randint(64, (8, 40), generator=torch.Generator().manual_seed(1))


class Decode:
    """A history of judgments of decode: what was decoded after fixed prompts, and how prefill scores it."""

    def __init__(self, dtype: str) -> None:
        self.dtype, self.history = dtype, History()

    def begin(self, decoded: Tensor, prefill: Tensor) -> None:
        self.history = begin_history(self.history, decode_look(Decoded(tokens=TOKENS, logprobs=decoded), prefill))

    def judge(self, decoded: Tensor, prefill: Tensor) -> SyncVerdict:
        look = decode_look(Decoded(tokens=TOKENS, logprobs=decoded), prefill)
        limits = Limits(dtype=self.dtype, baseline=NOISE[self.dtype], noise=2)
        self.history, verdict = judge_decode(self.history, look, limits, changed=True)
        return verdict


def started_decode(dtype: str) -> tuple[Decode, Tensor, Tensor]:
    """Return a history with a baseline, what was decoded for it, and how exact weights would score that."""
    check, exact = Decode(dtype), probes(0)
    decoded = noisy(exact, NOISE[dtype], 1)
    check.begin(decoded, noisy(exact, NOISE[dtype], 2))
    return check, decoded, exact


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [0.0, 0.3])
def test_an_engine_that_decodes_as_it_prefills_is_never_accused(dtype: str, step: float) -> None:
    check, _, exact = started_decode(dtype)
    for update in range(15):
        exact = exact + step * probes(update + 100).sub(-10)
        verdict = check.judge(noisy(exact, NOISE[dtype], 3 + update), noisy(exact, NOISE[dtype], 50 + update))
        assert verdict.ok, verdict.message


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_captured_decode_is_named_as_soon_as_the_policy_has_moved(dtype: str) -> None:
    check, decoded, exact = started_decode(dtype)
    for update in range(12):  # each is about as large as the noise
        exact = exact + STEP[dtype] * probes(update + 100).sub(-10)
        # Judged from a history that went through a checkpoint.
        check.history = from_json(History, json.loads(json.dumps(to_json(check.history))), "decode")
        verdict = check.judge(decoded, noisy(exact, NOISE[dtype], 50 + update))
        if not verdict.ok:
            break
    assert not verdict.ok and "did not change at all" in verdict.message
    assert verdict.gap_mean < verdict.threshold, "it is named before the gap alone would"


def test_a_captured_decode_that_is_not_reproducible_is_named_by_the_older_weights() -> None:
    check, decoded, exact = started_decode("bfloat16")
    verdict = check.judge(noisy(decoded, 1e-4, 7), noisy(exact, 0.05, 8))
    assert not verdict.ok and "from its prefill before an earlier" in verdict.message
    assert verdict.gap_mean < verdict.threshold


def test_a_decode_that_is_wrong_from_the_start_is_not_its_own_measure() -> None:
    check, exact = Decode("bfloat16"), probes(0)
    check.begin(noisy(exact, 0.3, 1), exact)
    verdict = check.judge(noisy(exact, 0.3, 2), exact)
    assert not verdict.ok and verdict.gap_mean > verdict.threshold >= 10 * NOISE["bfloat16"]


def test_first_tokens_and_the_largest_tenth_are_left_out() -> None:
    check, decoded, _ = started_decode("bfloat16")
    prefill = noisy(decoded, NOISE["bfloat16"], 5)
    prefill[:, 0] += 5.0
    prefill[:3, 3] += 2.0
    assert check.judge(decoded, prefill).ok
    prefill[:, 3:9] += 2.0
    assert not check.judge(decoded, prefill).ok


def test_a_decoded_logprob_that_is_not_finite_is_named_and_no_baseline() -> None:
    check, exact = Decode("float16"), probes(0)
    broken = exact.clone()
    broken[2, 3] = torch.nan
    verdict = check.judge(broken, exact)
    assert not verdict.ok and "not finite" in verdict.message and check.history.baseline is None
    assert check.judge(exact, noisy(exact, 5e-4)).ok


# Sums of bits.


def test_fingerprint_sees_one_step_at_the_smallest_learning_rate() -> None:
    model = nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    before = fingerprint(model.named_parameters())
    model(torch.ones(2, 32)).mean().backward()
    optimizer.step()
    assert fingerprint(model.named_parameters()) != before


def test_fingerprint_is_of_the_weights_and_nothing_else() -> None:
    weight = torch.arange(12.0).reshape(3, 4)
    others = [weight.reshape(4, 3), weight.half(), weight.flip(0), torch.nextafter(weight, weight + 1)]
    tensors = [("w", weight), ("v", weight), *(("w", other) for other in others)]
    assert len({fingerprint([tensor]) for tensor in tensors}) == len(tensors)
    # Not contiguous, but the same values in the same places.
    assert fingerprint([("w", weight.T.contiguous().T)]) == fingerprint([("w", weight)])


SHAPES = [(), (7,), (1, 5), (50, 3), (3 * SAMPLED_ROWS + 17, 5), (2 * SAMPLED_ROWS, 2, 3)]
NAME = "model.embed_tokens.weight"


def tensor(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def summed(values: Tensor, cuts: list[int]) -> dict[str, BitSums]:
    """Return the sums of a tensor that processes hold in pieces."""
    flat, bounds = values.reshape(-1), [0, *sorted(cuts), values.numel()]
    pieces = [
        Piece(values=flat[start:end], start=start, shape=tuple(values.shape))
        for start, end in zip(bounds, bounds[1:], strict=False)
    ]
    return added({NAME: sums_of(piece, torch.float16)} for piece in pieces)


@pytest.mark.parametrize("shape", SHAPES)
def test_pieces_add_up_to_the_whole_however_it_is_cut(shape: tuple[int, ...]) -> None:
    values = tensor(shape)
    whole = summed(values, [])
    draw = torch.Generator().manual_seed(3)
    for count in range(1, 20):
        cuts = torch.randint(values.numel() + 1, (count,), generator=draw).tolist()
        assert summed(values, cuts) == whole, cuts
    count = whole[NAME][0]
    assert count == values.numel() or SAMPLED_ROWS <= count / values[0].numel() < 2 * SAMPLED_ROWS


def test_one_bit_and_rows_that_change_places_show() -> None:
    values = tensor((50, 3)).half()
    whole = summed(values, [])
    for row in range(50):
        changed = values.clone()
        changed[row].view(torch.int16)[-1] ^= 1
        assert summed(changed, []) != whole
    assert summed(values.flip(0), []) != whole


@pytest.mark.parametrize(("copies", "others"), [(1, 1), (3, 2)])
def test_tensors_that_are_held_several_times_are_compared(copies: int, others: int) -> None:
    values, old = tensor((50, 3)), tensor((50, 3), 1)
    shapes = {NAME: (50, 3)}
    sent, before = (added([summed(v, [17, 90])] * copies) for v in (values, old))
    (good,) = compare_sums(added([summed(values, [])] * others), sent, before, shapes)
    assert good.equal and good.matches_previous is False
    (stale,) = compare_sums(added([summed(old, [30])] * others), sent, before, shapes)
    assert not stale.equal and stale.matches_previous is True
    # One of several engines that kept its weights spoils the sum.
    (mixed,) = compare_sums(added([summed(values, []), summed(old, [])]), sent, {}, shapes)
    assert not mixed.equal and mixed.matches_previous is None


def test_what_one_side_does_not_hold_whole_is_not_compared() -> None:
    values = tensor((50, 3))
    part, nothing = (
        {NAME: sums_of(Piece(values=values[:rows].reshape(-1), start=0, shape=(50, 3)), torch.float16)}
        for rows in (20, 0)
    )
    for other in (part, nothing, {}):
        assert compare_sums(other, summed(values, []), {}, {NAME: (50, 3)}) == []
        assert compare_sums(summed(values, []), other, {}, {NAME: (50, 3)}) == []
