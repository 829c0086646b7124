"""Checks that a mean, a block, a route or a position can refute; and a run's own pass, taken apart by trying."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mismatch_ext.doctor import Diagnosis, Sample, Scores, Tried, conclude, diagnose, gather, report
from mismatch_ext.doctor.diagnose import judge_remedy, request_or_engine
from mismatch_ext.doctor.evidence import ROUTES, Block, Later, Part, RunPass
from mismatch_ext.doctor.logged_trainer import compare_logged
from mismatch_ext.doctor.logits import LogitTable
from mismatch_ext.report.doctor import why_of
from tests.unit.test_doctor import LENGTH, RESPONSES, ROUNDING, drawn, drift, nucleus, tried

NAMES = {"padding on the left": "layout", "packing": "packed"}


def late(z: Tensor, first: int = 20) -> Tensor:
    """Return logits that are wrong from a place of each response on."""
    return torch.where((torch.arange(len(z)) % LENGTH >= first)[:, None], drift(z, 0.3), z)


def test_an_engine_that_errs_on_one_token_in_seventy_is_not_clean() -> None:
    sample, scores = drawn()
    rounding = float(np.abs(sample.engine - scores.trainer).mean())
    moved = sample.engine + np.where(np.arange(len(sample.engine)) % 70 == 0, 16 * rounding, 0.0)
    found = diagnose(replace(sample, logprobs=tuple(map(tuple, moved.reshape(RESPONSES, LENGTH).tolist()))), scores)
    assert found.left < 1.3 and found.left_tail > 3 and found.verdict == "unexplained", report(found)
    assert found.exit_status(1e-4) == 3 and diagnose(sample, scores).verdict == "clean"


def test_what_explains_less_than_half_is_a_hint() -> None:
    found = diagnose(*drawn(lambda z: z * 1.04, extra=lambda z: drift(z, 0.1)))
    assert not found.causes and found.verdict == "unexplained" and found.hints, report(found)


def test_a_cut_tail_is_told_beside_a_report_from_before_the_temperature() -> None:
    evidence = gather(*drawn(lambda z: nucleus(0.8)(z / 0.7), reported=lambda z: z, temperature=0.7))
    found = conclude(evidence)
    assert found.causes[0].key == "raw_logprobs", report(found)
    assert "without the tail" in report(found)
    # Where rounding does not judge reports of another temperature, the remedy confirms them.
    partly = replace(found, causes=found.causes[:1], verdict="partly")
    judge_remedy(partly, evidence, Tried(families=["reporting"], left=1.0, after=evidence.explained.rest))
    assert partly.verdict == "explained"


def test_a_name_whose_remedy_takes_nothing_is_refuted() -> None:
    evidence = gather(*drawn(lambda z: z + 0.8 * (torch.arange(z.shape[-1]) == 3)))
    assert [cause.key for cause in conclude(evidence).causes] == ["logit_bias"]
    # An error as large at other tokens, in the place of what the remedy should have left.
    left = tried(evidence, "sampling", 9.0, evidence.explained.error[::-1].copy())
    assert not left.causes and left.verdict == "unexplained", report(left)
    assert "refuted: its remedy took 0% of" in left.hints[0] and "to fix" not in report(left)
    assert left.unexplained > 0 and any("which is refuted" in part.name for part in left.parts)


@pytest.mark.parametrize(("engine", "rounding", "named"), [(0.05, 0.04, False), (0.2, 0.05, True)])
def test_experts_are_judged_by_what_rounding_flips(engine: float, rounding: float, named: bool) -> None:
    sample, scores = drawn()
    found = diagnose(sample, replace(scores, flips=(engine, rounding), most_flips=(7, 0.41)))
    assert ("router" in {cause.key for cause in found.causes}) == named == (found.exit_status(1e-4) > 0), report(found)
    assert f"router at {engine:.2%} of tokens and layers (most in layer 7" in report(found)


def first_tokens(sample: Sample, scores: Scores, count: int) -> tuple[Sample, Scores]:
    kept = np.tile(np.arange(LENGTH) < count, RESPONSES)
    part = replace(
        sample, responses=tuple(row[:count] for row in sample.responses), masks=tuple(row[:count] for row in sample.masks),
        logprobs=tuple(row[:count] for row in sample.logprobs),
    )  # fmt: skip
    return part, Scores(
        trainer=scores.trainer[kept],
        own=scores.own[kept],
        logits=scores.logits[torch.from_numpy(kept)],
        float32_error=scores.float32_error,
    )


def test_clean_is_bounded_by_the_length_that_was_seen_and_refuted_behind_it() -> None:
    assert diagnose(*drawn(extra=lambda z: drift(z, 0.3))).begins is None
    whole, scores = drawn(extra=late)
    evidence = gather(*first_tokens(whole, scores, 15))
    evidence.longest = LENGTH
    assert f"Clean up to token 15 of {LENGTH}" in report(conclude(evidence))
    evidence.later = Later.of(whole, scores)
    found = conclude(evidence)
    assert found.verdict == "unexplained" and found.begins is not None and abs(found.begins - 20) <= 1
    evidence.later = Later.of(*drawn())
    sound = conclude(evidence)
    assert sound.verdict == "clean" and (sound.seen, sound.longest) == (LENGTH, LENGTH) and "Clean:" in report(sound)


def test_a_block_that_stands_out_forbids_clean_and_is_the_place() -> None:
    evidence = gather(*drawn())
    fine, wrong = (Block(layer=1, kind="mlp", error=error, own=1e-3) for error in (1.1e-3, 9e-3))
    evidence.blocks = [fine]
    assert conclude(evidence).verdict == "clean"
    evidence.blocks = [fine, wrong]
    found = conclude(evidence)
    assert found.verdict == "unexplained" and found.exit_status(1e-4) == 3
    assert "where: layer 1, mlp, 9.0 of rounding's; 1 of 2 blocks" in report(found)


def test_the_request_is_told_from_the_engine_by_its_score_of_a_prompt() -> None:
    evidence = gather(*drawn(extra=lambda z: drift(z, 0.3)))
    for left, size, said in (
        (0.98, 1e-3, "sampling or what it reports differ"),
        (9.0, 1e-2, "configuration or arithmetic differ"),
        (9.0, 1e-6, "are sound"),  # two float32 programs
    ):
        evidence.prompt = (left, np.full(9, size))
        assert said in report(conclude(evidence))
    assert not request_or_engine(1.29, 1.32, exact=False), "two errors of about the size of rounding"


def test_only_what_made_a_runs_own_gap_fall_is_named_with_its_remedy() -> None:
    sample, scores = drawn()
    made = np.random.default_rng(0)
    moved = 20 * ROUNDING * made.normal(size=len(scores.trainer))
    run = replace(scores, trainer=scores.trainer + moved, straight=scores.trainer, layout="the run's own pass")

    def apart(right: str, run: Scores = run) -> Diagnosis:
        evidence = gather(sample, run)
        tries = {said: (name, run.trainer if said == right else scores.own) for said, name in NAMES.items()}
        evidence.run_pass = RunPass(computed=run.trainer, plain=scores.trainer, tries=tries)
        return conclude(evidence)

    padded = apart("padding on the left")
    assert (
        padded.verdict == "explained" and "padding on the left" in report(padded) and "position_ids" in report(padded)
    )
    packed = apart("packing")
    assert "use_remove_padding=false" in report(packed) and "position_ids" not in report(packed)
    neither = apart("")
    assert neither.verdict == "partly" and neither.exit_status(1e-4) == 3 and "use_remove" not in report(neither)
    assert apart("", scores) == diagnose(sample, scores)


def against_logged(sample: Sample, scores: Scores, logged: np.ndarray, *, scored_late: bool = False) -> Diagnosis:
    """Diagnose a log that holds its trainer's log-probabilities."""
    evidence = gather(sample, scores)
    evidence.logged = compare_logged(sample, scores, logged, scored_late=scored_late)
    return conclude(evidence)


def test_a_trainer_that_is_not_the_logs_is_not_judged_and_the_temperature_is_named() -> None:
    sample, scores = drawn()
    _, other = drawn(temperature=0.8)
    found = against_logged(sample, scores, other.trainer)
    assert diagnose(sample, scores).verdict == "clean"
    assert found.verdict == "other_trainer" and found.exit_status(10.0) == 3, report(found)
    assert "and with --temperature 0.8 it is" in report(found) and "Not judged" in report(found)


@pytest.mark.parametrize("size", [0.0, 1.0])
def test_a_trainer_within_rounding_of_the_logs_is_judged(size: float) -> None:
    sample, scores = drawn()
    table = LogitTable.of(sample, scores.logits, 1.0)
    # As far from the oracle as this trainer, on the other side.
    logged = scores.trainer - 2 * size * (scores.trainer - table.logprob)
    logged[::7] = np.nan
    found = against_logged(sample, scores, logged)
    assert found.verdict == "clean" and "2,057 tokens; --model scores them" in report(found), report(found)


def rounds_nothing(engine_off: float) -> tuple[Sample, Scores]:
    """Return the scores of a model without any rounding, and an engine that is so many nats off, at random."""
    sample, scores = drawn(engine_rounding=0.0)
    exact = LogitTable.of(sample, scores.logits, 1.0).logprob
    off = engine_off * np.random.default_rng(0).normal(size=(RESPONSES, LENGTH))
    logprobs = tuple(map(tuple, (exact.reshape((RESPONSES, LENGTH)) + off).tolist()))
    return replace(sample, logprobs=logprobs), replace(scores, trainer=exact, own=exact)


@pytest.mark.parametrize(("off", "verdict"), [(0.0, "clean"), (1e-7, "clean"), (1e-4, "unexplained")])
def test_a_model_that_rounds_nothing_is_judged_by_a_last_place(off: float, verdict: str) -> None:
    """float32_error is 0 before its floor; a log that is written in float32 and read again is 1e-7 off."""
    found = diagnose(*rounds_nothing(off))
    assert found.verdict == verdict and np.isfinite(found.ratio), report(found)


def test_what_fits_a_gap_to_another_trainer_is_no_cause() -> None:
    sample, scores = drawn(lambda z: z / 0.8)
    whole = diagnose(sample, scores)
    found = against_logged(sample, scores, scores.trainer + 0.3)
    assert "to fix temperature" in report(whole) and "to fix" not in report(found)
    assert not found.causes and "like temperature, not judged" in report(found)
    why = why_of(json.loads(json.dumps(found.data())), "doctor", Path())
    assert why.advice is None and why.rounding is None


def test_a_trainer_of_later_weights_than_those_that_sampled_takes_no_verdict_away() -> None:
    sample, scores = drawn()
    found = against_logged(sample, scores, scores.trainer + 0.3, scored_late=True)
    assert found.verdict == "clean" and "may be of later weights" in report(found) and "Not judged" not in report(found)


def test_a_clean_verdict_says_what_replay_would_remove(tmp_path: Path) -> None:
    clean = diagnose(*drawn())
    routes = Part(name=ROUTES, mean=1e-4, share=0.23, low=0.23, high=0.23)
    found = replace(clean, parts=(*clean.parts, routes))
    said = report(found)
    assert "mode: R3" in said and "to replay" not in report(clean)
    removes = "Replay (R3) would remove the routes' part, about 23% of the gap."
    assert said.endswith(removes)
    assert why_of(json.loads(json.dumps(found.data())), "run", tmp_path).sentence.endswith(removes)


def test_parts_that_cancel_have_no_shares() -> None:
    sample, scores = drawn(lambda z: drift(z, 0.3))
    alike = sample.engine + 1e-6 * np.random.default_rng(0).normal(size=len(sample.engine))
    found = diagnose(sample, replace(scores, trainer=alike))
    assert found.cancels == "reference", report(found)
    assert all(part.share is None and part.low is None for part in found.parts)
    # Two sides that round alike are a clean pair.
    sample, scores = drawn()
    found = diagnose(sample, replace(scores, trainer=sample.engine + 0.01 * (scores.trainer - sample.engine)))
    assert found.verdict == "clean" and found.cancels == "rounding", report(found)
