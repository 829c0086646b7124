"""The doctor on samples of a known policy: planted causes are named with their parameter, and clean samples name nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from mismatch_ext.config import MismatchConfig
from mismatch_ext.doctor import (
    REMEDIES,
    Cause,
    Diagnosis,
    Evidence,
    Sample,
    Scores,
    Tried,
    conclude,
    diagnose,
    gather,
    remedy,
    report,
)
from mismatch_ext.doctor.diagnose import ANOTHER
from mismatch_ext.doctor.evidence import distance
from mismatch_ext.doctor.fits import own_rounding
from mismatch_ext.doctor.logits import LogitTable
from mismatch_ext.doctor.tokens import judge_ends, judge_tokens
from mismatch_ext.errors import NonFiniteLogprobError, RecordError
from mismatch_ext.rollout import SamplingSettings

VOCABULARY, RESPONSES, LENGTH = 24, 80, 30
ROUNDING = 3e-3  # of logits, about bfloat16's


def drawn(
    change: Callable[[Tensor], Tensor] = lambda z: z,
    *,
    reported: Callable[[Tensor], Tensor] | None = None,
    engine_rounding: float = ROUNDING,
    trainer_rounding: float = ROUNDING,
    responses: int = RESPONSES,
    temperature: float = 1.0,
    extra: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Sample, Scores]:
    """Sample from peaked random distributions whose logits an engine changes, and score the tokens with a rounding trainer."""
    made = torch.Generator().manual_seed(7)
    count = responses * LENGTH
    logits = torch.randn(count, VOCABULARY, generator=made) * 2.5

    def rounded(scale: float) -> Tensor:
        # Rounding of a network has a heavy tail.
        return logits + scale * torch.randn(count, VOCABULARY, generator=made) * torch.randn(count, 1, generator=made)

    engine = rounded(engine_rounding) if extra is None else extra(rounded(engine_rounding))
    tokens = torch.multinomial(change(engine.double()).softmax(-1), 1, generator=made)
    said = (reported or change)(engine.double()).log_softmax(-1).gather(-1, tokens)[:, 0]

    def score(z: Tensor) -> np.ndarray:
        return (z.double() / temperature).log_softmax(-1).gather(-1, tokens)[:, 0].numpy()

    ids = tokens[:, 0].view(responses, LENGTH).tolist()
    sample = Sample(
        prompts=((1, 2),) * responses,
        responses=tuple(map(tuple, ids)),
        masks=((True,) * LENGTH,) * responses,
        logprobs=tuple(map(tuple, said.view(responses, LENGTH).tolist())),
    )
    own = score(rounded(ROUNDING))
    scores = Scores(
        trainer=score(rounded(trainer_rounding)),
        own=own,
        logits=logits,
        float32_error=own_rounding(0.0, logits.numpy()),
        temperature=temperature,
    )
    return sample, scores


def scores_of(scores: Scores, kept: np.ndarray) -> Scores:
    """Return the scores of some of the tokens."""
    logits = scores.logits[torch.from_numpy(kept)]
    return replace(scores, trainer=scores.trainer[kept], own=scores.own[kept], logits=logits)


def nucleus(p: float) -> Callable[[Tensor], Tensor]:
    def change(z: Tensor) -> Tensor:
        best, at = z.softmax(-1).sort(-1, descending=True)
        out = torch.zeros_like(z, dtype=torch.bool).scatter(-1, at, best.cumsum(-1) - best >= p)
        return z.masked_fill(out, -torch.inf)

    return change


def best_of(k: int) -> Callable[[Tensor], Tensor]:
    return lambda z: z.masked_fill(z < z.topk(k, -1).values[:, -1:], -torch.inf)


def likely(p: float) -> Callable[[Tensor], Tensor]:
    return lambda z: z.masked_fill(z.softmax(-1) < p * z.softmax(-1).amax(-1, keepdim=True), -torch.inf)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_clean_pair_names_nothing(temperature: float) -> None:
    found = diagnose(*drawn(lambda z: z / temperature, temperature=temperature))
    assert found.verdict == "clean" and not found.causes and found.exit_status(0.0) == 0
    assert found.tokens_test.finding is None and "Clean" in report(found)


def tried(evidence: Evidence, family: str, left: float, after: np.ndarray) -> Diagnosis:
    """Return the conclusion with one remedy, as if it were the only one."""
    return conclude(replace(evidence, remedies=[Tried(families=[family], left=left, after=after)]))


# Of rounding, what a head in float32 leaves.
HEADED = 0.4


@pytest.mark.parametrize(
    ("engine", "trainer", "told", "name"),
    [
        (HEADED, 1.0, "", "the engine's head"),
        (1.0, HEADED, "float32", "the trainer's head"),
        (1.0, 1.0, "", None),
        (HEADED, HEADED, "float32", None),
        # Finer than a head alone can make it.
        (0.1, 1.0, "", None),
    ],
)
def test_a_head_in_float32_on_one_side_is_named_by_the_sizes_of_errors(
    engine: float, trainer: float, told: str, name: str | None
) -> None:
    sample, scores = drawn(engine_rounding=engine * ROUNDING, trainer_rounding=trainer * ROUNDING)
    _, other = drawn(engine_rounding=engine * ROUNDING, trainer_rounding=HEADED * ROUNDING)
    scores = replace(scores, headed=other.trainer, trainer_head=told, engine_dtype="bfloat16", trainer_dtype="bfloat16")
    found = diagnose(sample, scores)
    assert [cause.key for cause in found.causes] == ([] if name is None else ["head_dtype"]), report(found)
    assert found.verdict == ("clean" if name is None else "explained")
    if name is not None:
        assert found.causes[0].said.startswith(name) and found.causes[0].status == "measured"


PLANTED = {
    # Values that are on no grid.
    "temperature": (lambda z: z / 0.97, 0.97, 0.003),
    "top_p": (nucleus(0.93), 0.93, 0.01),
    "top_k": (best_of(6), 6, 0),
    "min_p": (likely(0.06), 0.06, 0.01),
    "logit_bias": (lambda z: z + 0.4 * (torch.arange(VOCABULARY) == 5), np.exp(0.4), 0.03),
    "bad_words": (lambda z: z.masked_fill(torch.arange(VOCABULARY) == 5, -torch.inf), 1.0, 0.0),
    "softcap": (lambda z: 23 * torch.tanh(z / 23), 23, 1.0),
}


@pytest.mark.parametrize("key", PLANTED)
def test_a_planted_setting_is_named_with_its_value(key: str) -> None:
    change, value, near = PLANTED[key]
    found = diagnose(*drawn(change))
    assert [cause.key for cause in found.causes] == [key] and found.verdict == "explained", report(found)
    assert abs(found.causes[0].parameter - value) <= near and found.left < 1.3
    assert sum(part.share for part in found.parts if part.share is not None) == pytest.approx(1)
    assert found.exit_status(0.0) == 1 and f"to fix {key}:" in report(found)
    json.dumps(found.data(), allow_nan=False)


def test_rows_of_padding_and_reported_logits_are_named() -> None:
    padded = diagnose(*drawn(reported=lambda z: torch.cat([z, torch.zeros(len(z), 40)], -1)))
    assert padded.causes[0].key == "padded_vocabulary" and padded.causes[0].parameter == pytest.approx(40, abs=4)
    sample, scores = drawn()
    at = np.arange(len(sample.tokens))
    logits = scores.logits.numpy()[at, sample.tokens].reshape(RESPONSES, LENGTH)
    (cause,) = diagnose(replace(sample, logprobs=tuple(map(tuple, logits.tolist()))), scores).causes
    assert cause.key == "logits_reported"


def test_logits_that_are_scaled_are_told_from_a_temperature_by_the_score_of_a_prompt() -> None:
    evidence = gather(*drawn(lambda z: z / 0.9))
    assert [cause.key for cause in conclude(evidence).causes] == ["temperature"]
    told = tried(evidence, "sampling", 9.0, evidence.explained.error)
    (cause,) = told.causes
    assert (cause.key, cause.family, cause.status) == ("logit_scale", "config", "fits")
    assert cause.parameter == pytest.approx(1 / 0.9, abs=0.01)


def test_responses_that_end_otherwise_are_seen() -> None:
    sample, _ = drawn()
    ended = tuple((*(4 if token == 3 else token for token in row[:-1]), 3) for row in sample.responses)
    sound = replace(sample, responses=ended)
    assert judge_ends(sound, (3,)) == ()
    assert judge_ends(sample, ()) == ()
    going_on = replace(sample, responses=((*ended[0][:5], 3, *ended[0][6:]), *ended[1:]))
    (said,) = judge_ends(going_on, (3,))
    assert said.startswith("1 responses go on after an end")
    cut_off = replace(sample, responses=((*ended[0][:-1], 4),) * 20 + ended[20:])
    (said,) = judge_ends(cut_off, (3,))
    assert said.startswith("20 responses (25%) are cut at 30 tokens")


@pytest.mark.parametrize(
    ("change", "key"), [(nucleus(0.9), "top_p"), (best_of(4), "top_k"), (lambda z: z / 0.8, "temperature")]
)
def test_sampling_that_the_log_probabilities_hide_is_seen_in_the_tokens(
    change: Callable[[Tensor], Tensor], key: str
) -> None:
    found = diagnose(*drawn(change, reported=lambda z: z))
    assert [cause.key for cause in found.causes] == [key] and found.causes[0].share is None, report(found)
    assert found.verdict == "explained" and found.gap["logp_abs_diff_mean"] < 0.01
    assert "raw_logprobs" in found.causes[0].ties and not found.mendable, "a score of the tokens confirms nothing"


@pytest.mark.parametrize(("change", "key"), [(lambda z: z / 0.7, "raw_logprobs"), (lambda z: z, "temperature")])
def test_another_temperature_is_told_from_log_probabilities_before_it_by_the_tokens(
    change: Callable[[Tensor], Tensor], key: str
) -> None:
    # What is reported is the same: which of the two fits it better is chance.
    found = diagnose(*drawn(change, reported=lambda z: z, temperature=0.7))
    (cause,) = found.causes
    other = {"raw_logprobs": "temperature", "temperature": "raw_logprobs"}[key]
    assert cause.key == key and cause.ties == (other,) and cause.parameter == pytest.approx(1, abs=0.01), report(found)
    assert remedy("temperature", 0.7).trl == "temperature: 0.7"


def drift(logits: Tensor, size: float) -> Tensor:
    """Return an error that nothing on the list makes."""
    made = torch.Generator().manual_seed(3)
    return logits + size * torch.randn(logits.shape, generator=made)


def test_what_is_not_on_the_list_is_unexplained_and_not_misnamed() -> None:
    found = diagnose(*drawn(extra=lambda z: drift(z, 0.05)))
    assert found.verdict == "unexplained" and not found.causes, report(found)
    assert found.exit_status(1e-4) == 3 and found.exit_status(1.0) == 1


def test_a_fault_of_few_tokens_is_not_clean() -> None:
    def few(z: Tensor) -> Tensor:
        return torch.where((torch.arange(len(z)) % 150 == 3)[:, None], drift(z, 1.0), z)

    found = diagnose(*drawn(extra=few))
    assert found.left > 1.3 and found.verdict == "unexplained", report(found)


def changed_model(sample: Sample, scores: Scores, size: float) -> Cause:
    """Return the cause that the engine's weights are others: it predicts what `drift` makes."""
    tokens = torch.from_numpy(sample.tokens)[:, None]

    def predict(x: float) -> np.ndarray:
        return drift(scores.logits.double(), size * x).log_softmax(-1).gather(-1, tokens)[:, 0].numpy()

    grid = (0.1, 0.5, 2.0, 10.0)
    return Cause(
        key="weights", family="weights", said="changed by {x}", predict=predict, grid=grid, neutral=1.0, steps=8
    )


@pytest.mark.parametrize("x", [1.07, 30.0])
def test_a_changed_model_is_fitted_between_the_points_of_its_grid(x: float) -> None:
    size = 0.02 / x
    sample, scores = drawn(extra=lambda z: drift(z, 0.02))
    cause = replace(changed_model(sample, scores, size), grid=(0.5, 0.9, 1.1, 2.0, 10.0, 100.0))
    found = diagnose(sample, scores, [cause])
    assert [named.key for named in found.causes] == ["weights"] and found.verdict == "explained", report(found)
    assert found.causes[0].parameter == pytest.approx(x, rel=0.05)


def test_two_causes_at_once_are_both_named() -> None:
    sample, scores = drawn(lambda z: z / 0.9, extra=lambda z: drift(z, 0.03))
    found = diagnose(sample, scores, [changed_model(sample, scores, 0.03)])
    assert {cause.key for cause in found.causes} == {"temperature", "weights"}, report(found)


def test_a_coarser_trainer_is_named_from_its_own_error() -> None:
    found = diagnose(*drawn(trainer_rounding=8 * ROUNDING))
    assert [cause.key for cause in found.causes] == ["trainer_dtype"] and 5 < found.trainer_ratio < 11


def test_a_trainer_that_overflows_is_refused_by_its_token() -> None:
    sample, scores = drawn()
    wrong = scores.trainer.copy()
    wrong[LENGTH * 3 + 5] = np.nan
    with pytest.raises(NonFiniteLogprobError, match="response 3, token 5.*1 of 2400"):
        diagnose(sample, replace(scores, trainer=wrong))


def test_tokens_of_another_distribution_are_not_clean() -> None:
    found = diagnose(*drawn(lambda z: z / 3, reported=lambda z: z))
    assert abs(found.tokens_test.z) > 5 and not found.causes
    assert found.verdict == "unexplained" and found.exit_status(1e-4) == 3 and "Clean" not in report(found)


def test_a_nucleus_beyond_the_kept_tokens_expects_none_outside() -> None:
    # 1,024 of 6,000 about equal tokens are kept: a fifth of the mass.
    made = torch.Generator().manual_seed(0)
    logits = 0.1 * torch.randn(400, 6_000, generator=made)
    tokens = torch.multinomial(logits.softmax(-1), 1, generator=made)
    said = logits.double().log_softmax(-1).gather(-1, tokens)[:, 0].view(20, 20).tolist()
    sample = Sample(
        prompts=((1,),) * 20,
        responses=tuple(map(tuple, tokens[:, 0].view(20, 20).tolist())),
        masks=((True,) * 20,) * 20,
        logprobs=tuple(map(tuple, said)),
    )
    found = judge_tokens(LogitTable.of(sample, logits, 1.0))
    assert all(part.expected == 0 for part in found.outside if part.setting == "top_p") and found.finding is None


def test_a_confirmed_remedy_makes_a_fit_a_cause() -> None:
    evidence = gather(*drawn(lambda z: z / 0.9))
    found = conclude(evidence)
    assert found.causes[0].status == "fits"
    mended = evidence.explained.rest
    assert tried(evidence, "sampling", 1.0, mended).causes[0].status == "confirmed"
    refuted = tried(evidence, "sampling", 9.0, mended)
    assert refuted.causes[0].status == refuted.verdict == "partly"


def test_malformed_samples_are_refused() -> None:
    sample, _ = drawn()
    with pytest.raises(RecordError, match="all responses but one are masked"):
        replace(sample, masks=tuple((row == 0,) * LENGTH for row in range(RESPONSES)))
    wrong = [list(row) for row in sample.logprobs]
    wrong[3][5] = float("nan")
    with pytest.raises(NonFiniteLogprobError, match="response 3, token 5"):
        replace(sample, logprobs=tuple(map(tuple, wrong)))
    with pytest.raises(RecordError, match="mask values"):
        replace(sample, masks=((True,),) * RESPONSES)


def test_masked_tokens_do_not_count() -> None:
    sample, scores = drawn()
    masks = ((True,) * 26 + (False,) * 4,) * RESPONSES
    wrong = tuple(row[:26] + (float("nan"),) * 4 for row in sample.logprobs)
    kept = np.tile(np.arange(LENGTH) < 26, RESPONSES)
    part = scores_of(scores, kept)
    found: Diagnosis = diagnose(replace(sample, masks=masks, logprobs=wrong), part)
    assert found.tokens == 26 * RESPONSES and found.verdict == "clean"


@pytest.mark.parametrize(("late", "words"), [(2, "2 tokens late"), (-1, "1 token early")])
def test_a_mask_of_tool_turns_that_is_off_is_named(late: int, words: str) -> None:
    sample, scores = drawn()
    tool = np.zeros((RESPONSES, LENGTH), dtype=bool)
    tool[: RESPONSES // 2, 10:16] = True
    logprobs = np.where(tool, 0.0, np.array(sample.logprobs))
    for by, named in ((0, False), (late, True)):
        mask = ~np.roll(tool, by, axis=1)
        kept = mask.flatten()
        part = scores_of(scores, kept)
        logged = replace(sample, masks=tuple(map(tuple, mask)), logprobs=tuple(map(tuple, logprobs)))
        found = diagnose(logged, part)
        assert found.verdict == ("explained" if named else "clean"), report(found)
        assert [words in cause.said for cause in found.causes] == [True] * named, report(found)


@pytest.mark.parametrize(("skipped", "logged", "named"), [(1, True, True), (1, False, False), (9, True, False)])
def test_a_mask_that_starts_late_in_every_response_is_named(skipped: int, logged: bool, named: bool) -> None:
    sample, scores = drawn()
    kept = np.tile(np.arange(LENGTH) >= skipped, RESPONSES)
    logprobs = sample.logprobs if logged else tuple((None,) * skipped + row[skipped:] for row in sample.logprobs)
    part = scores_of(scores, kept)
    masks = (((False,) * skipped + (True,) * (LENGTH - skipped)),) * RESPONSES
    found = diagnose(replace(sample, masks=masks, logprobs=logprobs), part)
    assert [cause.key for cause in found.causes] == ["mask"] * named, report(found)
    assert found.verdict == ("explained" if named else "clean")


def test_another_model_is_told_from_a_fault_of_this_one() -> None:
    made = torch.Generator().manual_seed(3)
    few = 40
    other = torch.randn(few * LENGTH, VOCABULARY, generator=made)
    far, near = (drawn(lambda z, by=by: z + by * other, responses=few) for by in (1.0, 0.1))
    assert distance(*near) < ANOTHER < distance(*far)
    evidence = gather(*far)
    evidence.distance = distance(*far)
    found = conclude(evidence)
    (cause,) = found.causes
    assert cause.key == "other_model" and found.exit_status(1e-4) == 1
    # A cause that is the whole truth comes before it, however large.
    evidence = gather(*drawn(lambda z: z / 0.5, responses=few))
    named = conclude(evidence)
    evidence.distance = 9.0
    assert named.verdict == "explained" and conclude(evidence) == named


@pytest.mark.parametrize(
    ("heat", "cut", "key", "near"), [(0.9, nucleus(0.95), "top_p", (0.93, 0.97)), (0.95, best_of(6), "top_k", (6, 6))]
)
def test_a_temperature_beside_a_truncation_is_named_with_both_values(
    heat: float, cut: Callable[[Tensor], Tensor], key: str, near: tuple[float, float]
) -> None:
    found = diagnose(*drawn(lambda z: cut(z / heat)))
    first, second = found.causes
    assert first.key == "temperature" and abs(first.parameter - heat) < 0.01, report(found)
    assert second.key == key and near[0] <= second.parameter <= near[1], report(found)
    assert found.verdict == "explained", report(found)


def test_what_to_change_in_a_loop_of_your_own_is_taken_as_it_stands() -> None:
    lines = [remedy(name, 0.7).loop for name in REMEDIES]
    blocks = [line for line in lines if line.startswith("mismatch:")]
    for line in blocks:
        MismatchConfig.parse(yaml.safe_load(line)["mismatch"])
    calls = [line for line in lines if line.startswith("SamplingSettings")]
    for line in calls:
        eval(line, {"SamplingSettings": SamplingSettings})
    assert len(blocks) == 4 and len(calls) == 5 and "SamplingSettings(temperature=0.7)" in calls


def test_the_rest_behind_another_temperature_is_judged_by_rounding_at_that_temperature() -> None:
    # Most tokens are almost certain, and less so at the higher temperature, where rounding moves them more.
    evidence = gather(*drawn(lambda z: z / 0.2, reported=lambda z: z / 0.25, temperature=0.2))
    found = conclude(evidence)
    assert [cause.status for cause in found.causes] == ["fits"] and found.verdict == "explained", report(found)
    assert found.left < 1.3 and not evidence.noise.is_rounding(evidence.explained.rest)


@pytest.mark.parametrize("key", ["top_p", "temperature", "logit_bias"])
def test_some_of_the_tokens_choose_the_parameter_that_all_of_them_do(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, _, near = PLANTED[key]
    sample, scores = drawn(change)
    whole = diagnose(sample, scores)
    monkeypatch.setattr("mismatch_ext.doctor.logits.SCREENED", 1)
    few = LogitTable.of(sample, scores.logits, 1.0).screened()
    assert len(few.places) < int(sample.fits.sum()) / 4 and sample.fits[few.places].all()
    found = diagnose(sample, scores)
    (cause,), (wanted,) = found.causes, whole.causes
    assert cause.key == key and cause.parameter == pytest.approx(wanted.parameter, abs=near)
