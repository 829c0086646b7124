"""`mismatch-ext compat --verl`: verl's driver's checks of a configuration, without Ray."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")  # part of `make setup`

import ray
from mismatch_ext.adapters.cli import main
from mismatch_ext.adapters.verl import plugin

from examples.arithmetic.shipped import FOLDER
from tests.commands import ROOT, shell
from tests.peers.verl.prepared import GRPO

plugin.unload()  # importing the adapter has loaded it
BATCHES = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
)
CORRECTION = "algorithm.rollout_correction"
DENSE = (*GRPO, *BATCHES, f"actor_rollout_ref.model.path={FOLDER / 'dense'}")


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray was started"))


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, list[str]]]:
    status = main(["compat", "--json", "--verl", *words])
    found = json.loads(capsys.readouterr().out)
    return status, found


def test_every_refusal_is_named_and_not_the_first_alone(capsys: pytest.CaptureFixture[str]) -> None:
    block = ("+mismatch.routing.mode=R3", "+mismatch.correction.veto=0.1")
    status, found = checked(capsys, *DENSE, *block, "trainer.use_v1=False")
    assert (status, found["verdict"], found["later"]) == (1, "refused", [])
    names = ("trainer.use_v1", "mismatch.correction.veto")
    assert [line.partition("=")[0] for line in found["refused"]] == [*names]


def test_the_line_of_the_page_runs_as_it_is_pasted() -> None:
    (line,) = re.findall(
        r"^ +(mismatch-ext compat --verl .*)$", (ROOT / "docs/verl.md").read_text(encoding="utf-8"), flags=re.M
    )
    assert shell(line).endswith("verdict: accepted\n")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("data.train_batch_size=3 trainer.n_gpus_per_node=8", "AssertionError: real_train_batch_size"),
        # By its workers, or with the first batch.
        ("actor_rollout_ref.rollout.mode=sync", "InstantiationException: .*'sync' has been removed"),
        (f"{CORRECTION}.rollout_rs=geometric {CORRECTION}.rollout_rs_threshold=1.01", "ValueError: .*geometric"),
        (f"{CORRECTION}.rollout_rs=token_k1", "ValueError: .*threshold"),
    ],
)
def test_what_verl_itself_refuses_is_refused(
    words: str, error: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        f"M={words.split()[0]}\npython3 -m verl.trainer.main_ppo {' '.join(DENSE)} \\\n $M {words} > log\n"
    )
    status, found = checked(capsys, str(script), "+mismatch={}")
    assert status == 1 and re.match(f"verl: {error}", found["refused"][0])


def test_a_setting_that_verl_does_not_have_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = checked(capsys, *DENSE, "+mismatch={}", f"+{CORRECTION}.rollout_token_veto_threshold=1e-4")
    assert status == 0 and "RolloutCorrectionConfig of this verl has no such setting" in found["warnings"][0]


def test_a_config_that_only_measures_says_what_is_left_out_or_that_nothing_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    observe = (*DENSE, "+mismatch.level=observe", "+mismatch.routing.mode=R3")
    status, found = checked(capsys, *observe)
    assert (status, found["verdict"]) == (0, "accepted")
    status, found = checked(capsys, *observe, "trainer.use_v1=False")
    assert (status, found["verdict"]) == (1, "not measured") and "use_v1" in found["refused"][0]
    assert found["settings"] == []


def test_what_is_never_or_only_later_verified_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    loop = "actor_rollout_ref.rollout.agent.default_agent_loop=my_agent"
    status, found = checked(capsys, *DENSE, "+mismatch={}", "actor_rollout_ref.rollout.data_parallel_size=2", loop)
    assert (status, found["verdict"]) == (0, "accepted")
    assert "the rollout's weights are not verified" in found["warnings"][0]
    assert "'my_agent' is registered" in found["later"][-1]
    for preset, weighs in (("decoupled_token_is", True), ("decoupled_k3_rs", False)):
        _, found = checked(capsys, *DENSE, f"+mismatch.correction.preset={preset}")
        assert found["verdict"] == "accepted" and found["warnings"] == []
        assert any("the policy loss reacts" in line for line in found["later"]) == weighs, preset
        assert any("weight update" in line for line in found["later"])


@pytest.mark.nightly
def test_the_command_says_nothing_of_a_missing_gpu_and_names_a_verl_that_does_not_import() -> None:
    code = "import sys; {}; from mismatch_ext.adapters.cli import main; sys.exit(main())"

    def run(first: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", code.format(first), "compat", "--verl", *DENSE, "+mismatch={}"]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    done = run("pass")
    assert done.returncode == 0 and "accelerator" not in done.stderr and "Platform" not in done.stderr
    done = run("sys.modules['verl.trainer.ppo.utils'] = None")
    assert done.returncode == 2 and done.stderr.startswith("error: --verl: verl cannot be imported here: ")
    assert done.stderr.count("\n") == 1


def test_a_configuration_that_cannot_be_composed_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compat", "--verl", "no.such.key=1"]) == 2
    assert "error: --verl: Could not override 'no.such.key'" in capsys.readouterr().err
