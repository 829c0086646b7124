"""Every command and code block of README and docs has a test, here or in tests/evidence; what is quick runs here."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

from tests.evidence.slices import SLICES
from tests.readme import COMMANDS, PYTHON, ROOT, in_readme, run_block, script, shell
from tests.stories import STORIES, told

# Each command is run by the test named here; a command that appears in README or docs and not here fails.
RUN_BY = {
    "make demo": "evidence/test_demo.py::test_the_demo_shows_the_claim",
    "make demo MODEL=moe STEPS=2 RUN_DIR=runs/moe": "evidence/test_demo_moe.py::test_the_demo_trains_with_experts",
    "make test": "peers/test_readme.py::test_make_test_is_what_runs_this",
    "make check": "peers/test_readme.py::test_make_test_is_what_runs_this",
    "make test-isa": "peers/test_readme.py::test_make_test_isa_and_mutants",
    "make mutants": "peers/test_readme.py::test_make_test_isa_and_mutants",
    "make evidence": "peers/test_readme.py::test_make_evidence",
    "make evidence SLICE=3": "peers/test_readme.py::test_make_evidence",
    "make matrix": "peers/test_readme.py::test_make_stack_and_matrix",
    "make stack STACK=verl-pins": "peers/test_readme.py::test_make_stack_and_matrix",
    "make stack STACK=trl-default": "peers/test_readme.py::test_make_stack_and_matrix",
    "make upstream": "peers/test_readme.py::test_make_upstream",
    "python -m benchmarks.gpu": (
        "peers/transformers/test_gpu_benchmark.py::test_a_killed_run_goes_on_and_does_nothing_again"
    ),
    "python -m benchmarks.stability --out runs/stability_again --arms bypass matched --seeds 2 --jobs 2": (
        "evidence/test_stability.py::test_a_clip_on_the_engines_ratio_stops_what_is_learnt"
    ),
    "python -m benchmarks.quantised": "evidence/test_quantised.py::test_a_quantised_engine_is_further_away_and_weights_mend_it",
    "python -m benchmarks.quantised --engine sglang": (
        "evidence/test_quantised.py::test_a_quantised_sglang_is_further_away_and_weights_mend_it"
    ),
    "python -m benchmarks.quantised.growth": (
        "evidence/test_quantised.py::test_the_alarm_fires_on_an_error_that_grows_and_on_no_constant_one"
    ),
    "make bench": "evidence/test_bench.py::test_costs_beside_what_others_have",
    'pip install "mismatch-ext[trl,report]"': "evidence/test_readme.py::test_pip_install",
    "python examples/trl_async.py": (
        "evidence/test_async_example.py::test_drift_and_numerics_of_the_example_are_what_scoring_again_says"
    ),
    "python examples/trl_grpo.py": "peers/test_readme.py::test_script_then_report",
    "mismatch-ext report runs/mine/mismatch": "peers/test_readme.py::test_script_then_report",
    "python -m examples.loop --steps 2": "peers/test_examples.py::test_the_loop_with_vllm",
    "python -m examples.replay_gap --out runs/replay_gap": "evidence/test_replay_gap.py::test_replay_lowers_k3_after_training",
    "python -m examples.kl_placement --out runs/kl_placement.html": (
        "evidence/test_kl_placement.py::test_where_the_kl_term_goes_decides"
    ),
    "mismatch-ext doctor --model PATH --prompts prompts.txt --out runs/doctor": (
        "peers/test_doctor.py::test_a_clean_run_names_nothing_and_a_fault_is_named_confirmed_and_mended"
    ),
    "mismatch-ext doctor --trl config.yaml": "peers/test_doctor_hosts.py::test_a_run_of_trl_starts_as_trl_starts_it",
    "mismatch-ext doctor --verl actor_rollout_ref.model.path=PATH actor_rollout_ref.rollout.name=vllm "
    "data.train_files=train.parquet": (
        "peers/test_doctor_hosts.py::test_a_run_of_verl_starts_as_verls_server_starts_it"
    ),
    "mismatch-ext doctor --model PATH --engine sglang": (
        "peers/test_doctor_sglang.py::test_a_clean_run_names_nothing_a_fault_is_confirmed_and_failures_are_ours"
    ),
    "mismatch-ext doctor --model PATH --server http://127.0.0.1:8000": (
        "peers/test_doctor_server.py::test_over_http_a_clean_run_names_nothing_and_a_fault_is_named_and_confirmed"
    ),
    "mismatch-ext doctor --model PATH --rollouts rollouts.jsonl": (
        "peers/transformers/test_doctor.py::test_logged_rollouts_are_examined_without_an_engine"
    ),
    "mismatch-ext compat": "peers/test_readme.py::test_compat",
    'mismatch-ext readiness MODEL_DIR --prompt "386+47="': "peers/test_readme.py::test_readiness",
}
# Who runs each story of the docs, all of its commands in turn.
TOLD_BY = {
    "Ten minutes: symptom, doctor, flag, report": "evidence/test_doctor_story.py::test_the_quick_start",
    "TRL samples a nucleus": "evidence/test_doctor_story.py::test_a_nucleus_is_named_whether_or_not_it_leaves_a_gap",
    "verl trains a mixture of experts in bf16": (
        "evidence/test_doctor_story.py::test_routes_and_rounding_of_a_run_of_verl_are_told_apart"
    ),
    "A LoRA adapter never reaches the engine": (
        "evidence/test_doctor_story.py::test_an_adapter_that_is_missing_and_one_that_is_older_are_named"
    ),
}
RUN_BY |= {step.command: where for title, where in TOLD_BY.items() for step in told(*STORIES[title])}
# Python blocks that run here: uniform FP16, and routing replay. The others run in tests/evidence/test_readme.py.
EVERY_LANDING = (0, 1)
pytestmark = pytest.mark.engine


def test_every_command_has_a_test() -> None:
    unknown = [c for c in COMMANDS if not any(c == known or c.startswith(f"{known} --") for known in RUN_BY)]
    assert not unknown
    slices = {f"evidence/test_{name}.py" for chosen in SLICES for name in chosen.files}
    for where in RUN_BY.values():
        path, _, name = where.partition("::")
        defined = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8")).body
        assert name in {node.name for node in defined if isinstance(node, ast.FunctionDef)}, where
        assert path.startswith("peers/") or path in slices, where


def test_make_demo_is_the_whole_demo() -> None:
    assert "-m examples.demo --model both --run-dir runs/demo" in shell("make -n demo")
    assert "--train" not in shell("make -n demo") and "--train" in shell("make -n demo TRAIN=1")


def test_make_evidence() -> None:
    assert "-m tests.evidence --slice 3" in shell("make -n evidence SLICE=3")
    assert "--slice" not in shell("make -n evidence")


def test_make_test_is_what_runs_this() -> None:
    # Running it from within itself would not end; under CI this very process must have been started by it.
    if "CI" in os.environ:
        assert os.environ.get("MISMATCH_MAKE_TEST") == "1"
    planned = shell("make -n test")
    # `make check` comes first, and is no test of this suite.
    fast, peers = (
        planned.find("-q -n 2 tests/unit tests/patching"),
        planned.find("-n 2 --dist loadgroup --no-loadscope-reorder"),
    )
    assert -1 < fast < peers


def test_make_test_isa_and_mutants() -> None:
    # Both run tests of this suite: under other limits, and with faults. That each fault still applies, tests/unit/test_mutants.py
    # holds.
    assert "-m tests.isa" in shell("make -n test-isa")
    assert "-m tests.mutants kl --jobs 2" in shell("make -n mutants FAULTS=kl")


def test_make_stack_and_matrix() -> None:
    # They run tests that this suite runs too, in other environments: what they would start is looked at, what they wrote is held
    # against what is declared in tests/unit/test_stacks.py.
    assert "-m tests.stacks trl-default --jobs 2" in shell(f"{in_readme('make stack STACK=trl-default')} -n")
    assert "-m tests.stacks all --jobs 2" in shell(f"{in_readme('make matrix')} -n")


def test_make_upstream() -> None:
    # tests/peers/test_upstream.py runs the scripts themselves, by what the command calls.
    assert "-m docs.upstream --page" in shell(f"{in_readme('make upstream')} -n").replace("  ", " ")


def test_script_then_report() -> None:
    shell(in_readme("python examples/trl_grpo.py"))
    printed = shell(in_readme("mismatch-ext report"))
    assert "runs/mine/mismatch/report.html" in printed and (ROOT / "runs/mine/mismatch/report.html").is_file()


def test_readiness(dense: Path) -> None:
    printed = shell(in_readme("mismatch-ext readiness").replace("MODEL_DIR", str(dense)))
    assert re.search(r"^float16: (ready|risky)", printed, flags=re.M), printed


def test_compat() -> None:
    printed = shell(in_readme("mismatch-ext compat"))
    assert "TRL GRPO + vLLM" in printed and "verl + vLLM" in printed, printed


@pytest.mark.parametrize("block", range(len(PYTHON)))
def test_every_python_block_is_python(block: int) -> None:
    compile(script(block, "model", "run"), f"block {block}", "exec")


@pytest.mark.parametrize("block", EVERY_LANDING)
def test_two_python_blocks_run(dense: Path, moe: Path, tmp_path: Path, block: int) -> None:
    run_block(block, {"dense": dense, "moe": moe}, tmp_path)
