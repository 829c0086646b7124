"""Sums per response: those of the metrics, and float32's own rounding by a pass in float64 that is float64 throughout."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.arithmetic.tokenizer import encode
from examples.sequences import (
    SequenceSums,
    Sums,
    in_float64,
    judged_replay,
    left_by_replay,
    of_float32_rounding,
    over_halfway,
    read_sequences,
    times_larger,
    without_flips,
)
from mismatch_ext.gap import gap_metrics, gap_sums
from tests.evidence import judges
from tests.models import tiny_model


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_float64_pass_is_float64_throughout_and_leaves_the_model_as_it_was(kind: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model(kind, tmp_path / "model"))
    ids = torch.tensor([encode("386+47=6+7+0=13")])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        single = model(ids).logits
        with in_float64(model):
            double = model(ids).logits
            # A model whose norms or rotary angles fell back to float32 would not see a change of 1e-12.
            weights = model.get_input_embeddings().weight
            weights.mul_(1 + 1e-12)
            moved = model(ids).logits
            weights.div_(1 + 1e-12)
        again = model(ids).logits
    assert double.dtype == torch.float64 and single.dtype == torch.float32
    assert 0 < (single - double).abs().max() < 1e-4
    assert 0 < (moved - double).abs().max() < 1e-9
    assert torch.equal(again, single)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def listening(batches: list[dict[str, Any]]) -> SequenceSums:
    """Return the sums of a trainer that evaluates these batches, with replay and without."""
    seen: list[tuple[Any, ...]] = []
    recorder = SimpleNamespace(observe=lambda *given, native=False: seen.append((*given, native)))

    def generate(batch: dict[str, Any]) -> dict[str, Any]:
        trainer.mm.log.observe(batch["split"], batch["old"], batch["rollout"], batch["mask"])
        trainer.mm.log.observe(batch["split"], batch["native"], batch["rollout"], batch["mask"], native=True)
        return batch

    mm = SimpleNamespace(log=recorder, score_again=None)
    trainer = SimpleNamespace(mm=mm, _generate_and_score_completions=generate)
    sums = SequenceSums(trainer)
    for batch in batches:
        trainer._generate_and_score_completions(batch)
    assert len(seen) == 2 * len(batches)  # what listens takes nothing away
    return sums


def batch(seed: int, split: str = "eval/familiar") -> dict[str, Any]:
    """Return a batch of 6 responses of up to 9 tokens; the trainer's own routes double the gap."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(6, 9, generator=generator)
    gap = 1e-3 * torch.randn(6, 9, generator=generator)
    mask = torch.arange(9) < torch.randint(1, 10, (6, 1), generator=generator)
    rollout[~mask] = torch.nan  # nothing is read there
    return {"split": split, "old": rollout + gap, "native": rollout + 2 * gap, "rollout": rollout, "mask": mask}


def test_sums_over_tokens_are_the_metrics_means(tmp_path: Path) -> None:
    batches = [batch(0), batch(1), batch(2, split="train")]
    sums = listening(batches)
    sums.write(tmp_path)
    kept = read_sequences(tmp_path)
    assert set(kept) == {"eval/familiar"}
    found = kept["eval/familiar"]
    joined = {key: torch.cat([b[key] for b in batches[:2]]) for key in ("old", "native", "rollout", "mask")}
    for prefix, ours in (("", "old"), ("native/", "native")):
        metrics = gap_metrics(gap_sums(joined[ours], joined["rollout"], joined["mask"]))
        assert sum(found["tokens"]) == metrics["tokens"] and len(found["tokens"]) == 12
        assert sum(found[f"{prefix}abs"]) / metrics["tokens"] == pytest.approx(metrics["logp_abs_diff_mean"])
        assert sum(found[f"{prefix}k3"]) / metrics["tokens"] == pytest.approx(metrics["k3_kl"])
        assert sum(found[f"{prefix}f2"]) / metrics["tokens"] == pytest.approx(metrics["f_2"])


def test_ratios_are_of_what_they_say() -> None:
    kept = listening([batch(seed) for seed in range(8)]).sums
    assert left_by_replay(kept, "eval/familiar", "abs").value == pytest.approx(1 / 2, rel=1e-3)
    assert left_by_replay(kept, "eval/familiar", "k3").value == pytest.approx(1 / 4, rel=1e-2)
    doubled = {split: {**by, "abs": by["native/abs"]} for split, by in kept.items()}
    assert times_larger(doubled, kept, "eval/familiar", "abs").value == pytest.approx(2, rel=1e-3)
    rounding = {split: {**by, "rounding/abs": by["native/abs"]} for split, by in kept.items()}
    assert of_float32_rounding(rounding, "eval/familiar", "abs").value == pytest.approx(1 / 2, rel=1e-3)


def heavy(flipping: float, *, undone: float = 1.0, count: int = 3000) -> Sums:
    """Return responses whose rounding and flips both make a heavy-tailed k3; replay undoes a share of what flips make."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(20, 60, size=count).astype(float)
    flips = rng.poisson(1.5, size=count)
    rounding = tokens * rng.lognormal(sigma=1.2, size=count)
    added = rng.lognormal(sigma=1.5, size=count) * (flips > 0)
    added *= flipping * rounding.sum() / added.sum()
    # Under other routes rounding errors are other ones, but not independent of these.
    again = np.where(flips > 0, rounding * rng.lognormal(mean=-0.125, sigma=0.5, size=count), rounding)
    native = rounding + added
    left = (1 - undone) * native + undone * again
    return {"s": {"tokens": list(tokens), "flips": list(flips), "native/k3": list(native), "k3": list(left)}}


def test_a_replay_that_does_a_tenth_of_its_work_is_told_from_a_full_one() -> None:
    # Mostly flips, as on unfamiliar prompts; and flips that add little, where a full replay leaves 0.85.
    full = {"much": judged_replay(heavy(4.0), "s"), "little": judged_replay(heavy(0.18), "s")}
    assert full["much"]["share of rounding"] == pytest.approx(1 / 5, rel=0.2)
    assert full["little"]["left"]["value"] == pytest.approx(0.85, rel=0.1)
    judges.replay_lowers_k3(full)
    fault = judged_replay(heavy(4.0, undone=0.1), "s")
    assert fault["left"]["high"] < 1  # all that was asked for once
    for faults in ({"much": fault}, {**full, "much": fault}):
        with pytest.raises(AssertionError, match="much: replay leaves .* half of what flips add"):
            judges.replay_lowers_k3(faults)
    with pytest.raises(AssertionError, match="replay leaves"):
        judges.replay_lowers_k3({"much": judged_replay(heavy(4.0, undone=0.0), "s")})
    with pytest.raises(AssertionError, match="too few flips"):
        judges.replay_lowers_k3({"little": full["little"]})


def test_without_a_calm_response_half_of_k3_must_go() -> None:
    run = heavy(1.0, count=200)
    run["s"]["flips"] = [1.0] * 200
    assert without_flips(run, "s") == 0
    assert over_halfway(run, "s").value == pytest.approx(2 * left_by_replay(run, "s", "k3").value)
