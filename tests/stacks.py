"""The floor and the newest of each host, as users install them: `python -m tests.stacks NAME`. Standard library alone.

A stack is an environment in .stacks/NAME, built from the exact versions of requirements/stacks/NAME.txt, and the tests that run
there. docs/index.md says what they cover.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
TRL, VERL, ENGINES = "tests/peers/trl", "tests/peers/verl", "tests/peers/engines"
FAMILY = "tests/peers/transformers/test_families.py::test_family"

# What each section does in TRL, with any engine.
IN_TRL = (
    f"{TRL}/test_training.py::test_without_a_block_every_number_is_stock",
    f"{TRL}/test_training.py::test_float32_is_the_oracle",
    f"{TRL}/test_training.py::test_uniform_fp16_is_active_on_both_sides",
    f"{TRL}/test_training.py::test_an_engine_that_keeps_its_old_weights_is_caught",
    f"{TRL}/test_by_hand.py::test_steps_on_an_engines_rollouts[corrected-dense-0-8]",
    f"{TRL}/test_by_hand.py::test_steps_are_the_hand_computed_ones_or_refused[losses]",
    f"{TRL}/test_by_hand.py::test_steps_are_the_hand_computed_ones_or_refused[plain]",
    f"{TRL}/test_online.py::test_rloo_with_a_block_that_changes_nothing_is_stock",
    f"{TRL}/test_attach.py::test_measuring_changes_no_bit[stock]",
)

# Above each: what the user types, and what differs on a CPU. Files, tests or single cases, as pytest takes them.
STACKS: dict[str, tuple[str, ...]] = {
    # pip install "mismatch-ext[trl,report]" trl==1.13.0 vllm==0.24.0 transformers==5.9.0
    # vLLM's CPU build returns zeros for routes, so that R3 is refused; torchvision, torchaudio and triton are left out.
    "trl-oldest": (
        *IN_TRL,
        f"{TRL}/test_routing.py::test_replay_of_the_models_own_routes_changes_no_bit",
        f"{TRL}/test_routing.py::test_adapters_and_their_reference[R2]",
        f"{TRL}/without_routes.py",
    ),
    # pip install "mismatch-ext[trl,report]" trl==1.16.0 vllm==0.32.0
    # CPU builds of torch and vLLM, which records routes there by our patch alone; torchvision and torchaudio are left out.
    "trl-newest": (
        *IN_TRL,
        f"{TRL}/test_routing.py::test_float32_engine_and_trainer_route_identically",
        f"{TRL}/test_training.py::test_garbled_experts_are_caught_before_the_repair_and_pass_after",
        f"{TRL}/test_everything.py::test_every_section_is_active_in_one_run",
        f"{ENGINES}/test_vllm_routing.py::test_every_token_is_routed_as_transformers_routes_it",
        f"{ENGINES}/test_vllm_routing.py::test_after_an_update_or_under_another_version_no_prefix_is_cached",
        # Families whose routers differ in kind.
        *(f"{FAMILY}[{name}]" for name in ("gpt_oss", "longcat_flash", "glm4_moe", "olmoe")),
    ),
    # pip install "mismatch-ext[verl,report]" "verl[vllm]==0.9.1"
    # vLLM's CPU build, whose experts do not ask their router: the tests' platform tells it; torchvision and torchaudio are left
    # out. TRL is there for the tests that compare its corrections with verl's.
    "verl-pins": (
        f"{VERL}/test_main_ppo.py::test_every_section_is_active_in_one_run",
        f"{VERL}/test_main_ppo.py::test_answers_without_any_routing_end_the_run_and_what_was_saved_stays",
        f"{VERL}/test_engine.py",
        f"{VERL}/test_loss.py",
        f"{VERL}/test_settings.py",
        f"{VERL}/test_refusals.py",
        "tests/peers/test_correction_hosts.py",
    ),
    # printf 'transformers==5.9.0\nkernels>=0.12,<0.13\n' > overrides.txt
    # uv pip install --override overrides.txt "mismatch-ext[verl,report]" "verl[sglang]==0.9.1"
    # SGLang's CUDA kernels are left out, as is what text models do not use: torch computes, and a stub stands for `sgl_kernel`.
    "verl-sglang": (
        f"{VERL}/test_main_ppo_sglang.py::test_every_section_is_active_in_one_run",
        f"{VERL}/test_main_ppo_sglang.py::test_an_answer_that_verl_would_drop_ends_the_run",
        f"{ENGINES}/test_sglang.py",
        f"{ENGINES}/test_conformance.py",
        "tests/peers/engines/test_sglang_half.py",
    ),
}


def build(name: str) -> Path:
    """Return the folder of a stack's environment, built from empty unless it has the pins of today."""
    pins, folder = ROOT / f"requirements/stacks/{name}.txt", ROOT / ".stacks" / name
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--no-deps"]
    built_from = folder / "pins.txt"  # written last: an unfinished environment has none
    if not built_from.is_file() or built_from.read_bytes() != pins.read_bytes():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([*pip, "-r", str(pins)], check=True)
        shutil.copyfile(pins, built_from)
    subprocess.run([*pip, "--no-build-isolation", "-e", str(ROOT)], check=True)
    return folder


def run(name: str, folder: Path, jobs: int) -> bool:
    """Run a stack's tests with its own interpreter; tell whether all passed. A skipped test did not: its stack is here."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    pytest = [str(folder / "bin/python"), "-m", "pytest", "-q", "-n", str(jobs), "--dist", "loadfile"]
    done = subprocess.run(
        [*pytest, f"--junitxml={report}", *STACKS[name]], cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    return done.returncode == 0 and not any(ElementTree.parse(report).iter("skipped"))


def main() -> int:
    """Build a stack, run its tests, and return 1 unless all passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.stacks", description=__doc__)
    parser.add_argument("stack", choices=STACKS)
    parser.add_argument("--jobs", type=int, default=2, help="test files that run at once")
    options = parser.parse_args()
    start = time.monotonic()
    folder = build(options.stack)
    built = time.monotonic()
    passed = run(options.stack, folder, options.jobs)
    outcome = "passed" if passed else "failed"
    print(f"[stack] {options.stack} {outcome}: built in {built - start:.0f} s, tests {time.monotonic() - built:.0f} s")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
