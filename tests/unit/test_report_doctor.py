"""What the doctor found, in the report of a run and as a page of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mismatch_ext.doctor import Diagnosis, NamedCause, remedy
from mismatch_ext.doctor.evidence import Part
from mismatch_ext.doctor.tokens import TokensTest
from mismatch_ext.report import build, build_why
from mismatch_ext.report.doctor import read_why
from tests.unit.synthetic_runs import write_run


def found() -> Diagnosis:
    """Return a diagnosis of an engine that samples at another temperature."""
    cause = NamedCause(
        key="temperature", family="sampling", said="temperature is <0.9>", parameter=0.9, status="confirmed", share=0.96, z=20.0,
        slope=1.0, low=0.99, high=1.01, ties=(), remedy=remedy("temperature", 1.0),
    )  # fmt: skip
    part = Part(name="temperature", mean=1e-2, share=0.96, low=0.94, high=0.98)
    return Diagnosis(
        tokens=6000,
        responses=192,
        gap={"logp_abs_diff_mean": 1e-2, "k3_kl": 1e-4, "logp_abs_diff_max": 0.4},
        parts=(part,),
        ratio=15.0,
        tail_ratio=9.0,
        trainer_ratio=1.0,
        measurable=True,
        causes=(cause,),
        hints=("a hint",),
        left=0.9,
        left_tail=1.0,
        unexplained=0.0,
        notes=("a note",),
        tokens_test=TokensTest(z=0.1, temperature=1.0, outside=()),
        verdict="explained",
        tried=("temperature",),
    )


def write(folder: Path, diagnosis: Diagnosis) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "doctor.json").write_text(json.dumps({"run": {}, **diagnosis.data()}), encoding="utf-8")


def test_a_folder_of_the_doctor_has_a_page_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, found())
    page = build_why(tmp_path).read_text(encoding="utf-8")
    assert "temperature is &lt;0.9&gt;" in page and "96% (94% to 98%)" in page and "<script" not in page


def test_a_runs_report_has_the_section_and_its_verdict_names_the_cause(tmp_path: Path) -> None:
    write_run(tmp_path, "bf16")
    write(tmp_path, found())
    built = build(tmp_path)
    assert "the doctor found that temperature is <0.9> (96%, confirmed); change the lines under" in built.verdict
    assert 'id="why"' in built.path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("mean", "words"), [(0.02, "has a small gap"), (0.01, "has a gap above what healthy runs report")]
)
def test_what_the_doctor_calls_clean_is_no_elevated_gap(mean: float, words: str, tmp_path: Path) -> None:
    write_run(tmp_path, "bf16")  # 0.023 on its worst split, of which the doctor must have seen half
    gap = found().gap | {"logp_abs_diff_mean": mean}
    write(tmp_path, replace(found(), causes=(), verdict="clean", ratio=1.0, gap=gap))
    assert words in build(tmp_path).verdict


@pytest.mark.parametrize(("ratio", "level"), [(1.2, "small"), (9.0, "elevated")])
def test_a_gap_is_judged_against_the_models_own_rounding(tmp_path: Path, ratio: float, level: str) -> None:
    write_run(tmp_path, "fp16")
    write(tmp_path, replace(found(), causes=(), verdict="unexplained", unexplained=1e-3, ratio=ratio))
    (judged,) = build(tmp_path).judged
    assert judged.level == level and judged.rounding == ratio


def test_a_report_over_several_runs_has_the_runs_own_doctors(tmp_path: Path) -> None:
    write_run(tmp_path / "a" / "mismatch", "fp16")
    write_run(tmp_path / "b", "bf16")
    for folder in ("a/mismatch/doctor_step_0", "b/doctor_step_0", "doctor"):
        write(tmp_path / folder, replace(found(), ratio=0.97, causes=(), verdict="clean"))
    why, wrong = read_why(tmp_path)
    names = [each.name.partition("/")[2] for each in why]
    assert wrong == [] and names == ["a/doctor_step_0", "b/doctor_step_0", "doctor"]
    assert build(tmp_path).verdict.count("0.97 times this model's own rounding") == 2


def test_a_penalty_outranks_the_size_of_the_gap(tmp_path: Path) -> None:
    header = {"sampling": {"temperature": 1.0, "repetition_penalty": 1.05}}
    write_run(tmp_path, "fp16", **header)
    verdict = build(tmp_path).verdict
    assert "has a gap with a known cause" in verdict and "repetition_penalty=1.05 and its trainer does not" in verdict
