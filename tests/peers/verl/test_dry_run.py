"""`mismatch-ext compat --verl`: verl's driver's checks of a configuration, without Ray."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("verl")  # part of `make setup`

import ray
from mismatch_ext.adapters import cli
from mismatch_ext.adapters.cli import main
from mismatch_ext.adapters.verl import plugin

from examples.arithmetic.shipped import FOLDER
from mismatch_ext.errors import PeerVersionError
from tests.commands import ROOT, shell
from tests.peers.verl.prepared import GRPO

plugin.unload()  # importing the adapter has loaded it
BATCHES = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
)
DENSE = (*GRPO, *BATCHES, f"actor_rollout_ref.model.path={FOLDER / 'dense'}")
YAML = ("--config-path", str(ROOT / "examples/configs"), "--config-name=verl_grpo")


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
    assert main(["compat", "--verl", *DENSE, *block]) == 1
    assert capsys.readouterr().out.startswith("refused: mismatch.correction.veto=")


def test_the_configuration_in_a_file_is_accepted_with_what_it_sets(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = checked(capsys, *YAML, f"actor_rollout_ref.model.path={FOLDER / 'dense'}")
    assert (status, found["verdict"], found["refused"]) == (0, "accepted", [])
    assert "mixed_precision.param_dtype=fp16" in found["settings"][0]
    assert {f"actor_rollout_ref.{set_to}" for set_to in (
        "rollout.dtype='float16'", "actor.fsdp_config.mixed_precision.param_dtype='fp16'",
    )} <= {*found["settings"]}  # fmt: skip
    assert any("the weights fit the dtype" in line for line in found["later"])
    status, found = checked(capsys, *YAML, "mismatch=null")
    assert (status, found["verdict"]) == (1, "no mismatch config")


def test_the_line_of_the_page_runs_as_it_is_pasted() -> None:
    (line,) = re.findall(
        r"^ +(mismatch-ext compat --verl .*)$", (ROOT / "docs/verl.md").read_text(encoding="utf-8"), flags=re.M
    )
    assert shell(line).endswith("verdict: accepted\n")


def test_what_a_refusal_says_to_set_for_megatron_is_accepted_beside_the_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    own = (ROOT / "examples/configs/verl_grpo.yaml").read_text(encoding="utf-8")
    (tmp_path / "own.yaml").write_text(own.replace("    strategy: fsdp2\n", ""), encoding="utf-8")
    model = f"actor_rollout_ref.model.path={FOLDER / 'dense'}"
    engine = (model, "model_engine=megatron", "+mismatch.monitor.weight_sync=off")
    file = (*YAML, *engine, "~mismatch.precision")
    removed = ("~actor_rollout_ref.actor.strategy", "~actor_rollout_ref.ref.strategy")
    for overrides in ((), removed):
        status, found = checked(capsys, *file, *overrides)
        (message,) = found["refused"]
        assert status == 1 and message.startswith("model_engine='megatron': the actor has")
    said = re.search(r"Set (\S+=megatron) and (\S+=megatron), or (\S+)\.$", message)
    assert said is not None
    actor, ref, stock = said.groups()
    for accepted in (
        (*file, actor, ref),
        (*YAML, model, stock),
        # As the page says, without the two lines in the file: verl's own settings of the engine have the strategy.
        ("--config-path", str(tmp_path), "--config-name=own", *engine, "~mismatch.precision"),
    ):
        status, found = checked(capsys, *accepted)
        assert (status, found["verdict"], found["refused"]) == (0, "accepted", []), accepted


def test_what_verl_itself_refuses_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = checked(capsys, *DENSE, "+mismatch={}", "data.train_batch_size=3", "trainer.n_gpus_per_node=8")
    assert status == 1 and found["refused"][0].startswith("verl: AssertionError: real_train_batch_size")


def test_a_config_that_only_measures_says_what_is_left_out_or_that_nothing_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    observe = (*DENSE, "+mismatch.level=observe", "+mismatch.routing.mode=R3")
    status, found = checked(capsys, *observe)
    assert (status, found["verdict"]) == (0, "accepted")
    # Only by what the run is measured: nothing that is trained or sampled.
    assert [line.partition("=")[0].rpartition(".")[2] for line in found["settings"]] == [
        "worker_extension_cls", "trainer_mode", "VERL_USE_EXTERNAL_MODULES",
    ]  # fmt: skip
    status, found = checked(capsys, *observe, "trainer.use_v1=False")
    assert (status, found["verdict"]) == (1, "not measured") and "use_v1" in found["refused"][0]
    assert found["settings"] == [] and main(["compat", "--verl", *observe, "trainer.use_v1=False"]) == 1
    assert capsys.readouterr().out.endswith("verdict: not measured: verl would train without the config\n")
    status, found = checked(capsys, *DENSE, "+mismatch={}", "trainer.use_v1=False")
    assert (status, found["verdict"]) == (1, "not measured")


def test_what_verl_cannot_check_with_a_cpu_build_of_vllm_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """With LoRA, verl asks for the version of a distribution `vllm`."""
    lora = (*DENSE, "+mismatch={}", "actor_rollout_ref.model.lora_rank=8")
    status, found = checked(capsys, *lora)
    assert (status, found["refused"]) == (0, [])
    assert "verl: LoRA's rank, with the version of the distribution `vllm`" in found["later"]
    status, found = checked(capsys, *lora, "actor_rollout_ref.actor.strategy=fsdp")
    assert status == 0 and any(line.startswith("workers: peft finds the adapter") for line in found["later"])


def test_what_is_never_or_only_later_verified_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    loop = "actor_rollout_ref.rollout.agent.default_agent_loop=my_agent"
    status, found = checked(capsys, *DENSE, "+mismatch={}", "actor_rollout_ref.rollout.data_parallel_size=2", loop)
    assert (status, found["verdict"]) == (0, "accepted")
    assert "the rollout's weights are not verified" in found["warnings"][0]
    assert (
        not any("weight update" in line for line in found["later"]) and "'my_agent' is registered" in found["later"][-1]
    )
    for without in ("actor_rollout_ref.rollout.agent=null", "~actor_rollout_ref.rollout.agent.default_agent_loop"):
        status, found = checked(capsys, *DENSE, "+mismatch={}", without)
        assert (status, found["verdict"]) == (0, "accepted") and not any(
            "agent loops" in line for line in found["later"]
        )
    weighted, loss = "the policy loss reacts", "actor_rollout_ref.actor.policy_loss.loss_mode=nobody"
    for preset, expected in (("decoupled_token_is", True), ("decoupled_k3_rs", False), ("bypass_pg_is", False)):
        _, found = checked(capsys, *DENSE, f"+mismatch.correction.preset={preset}")
        assert found["verdict"] == "accepted" and any(weighted in line for line in found["later"]) == expected, preset
        paths = [re.split("[=:]", line)[0] for line in found["settings"]]
        assert len(paths) == len({*paths}) and "algorithm.rollout_correction" not in paths, preset
    _, found = checked(capsys, *DENSE, "+mismatch={}", loss)
    assert "workers: a policy loss 'nobody' is registered" in found["later"]
    _, found = checked(capsys, *DENSE, "+mismatch={}")
    assert found["warnings"] == [] and not any("policy loss" in line for line in found["later"])
    assert found["warnings"] == [] and any("weight update" in line for line in found["later"])
    assert not any("agent loops" in line for line in found["later"])


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


def test_only_what_verl_says_of_a_missing_gpu_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("verl.plugin.platform.platform_manager")

    def speak(*_: object) -> int:
        for line in ("No supported accelerator detected.", "Platform 'x' (X) is registered but", "Replacing"):
            logger.warning(line)
        return 0

    monkeypatch.setattr(cli, "run_command", speak)
    assert main([]) == 0 and [record.msg for record in caplog.records] == ["Replacing"]
    assert speak() == 0 and len(caplog.records) == 4


def test_an_error_of_ours_is_not_called_one_of_verls_imports(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise PeerVersionError("another version")

    module = ModuleType("weights")
    monkeypatch.setattr(module, "__getattr__", fail, raising=False)
    monkeypatch.setitem(sys.modules, "mismatch_ext.adapters.verl.driver.weights", module)
    assert main(["compat", "--verl", *DENSE, "+mismatch={}"]) == 2
    assert capsys.readouterr().err == "error: another version\n"


def test_a_configuration_that_cannot_be_composed_is_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["compat", "--verl", "no.such.key=1"]) == 2
    said = capsys.readouterr().err
    assert (
        "error: --verl: Could not override 'no.such.key'" in said
        and "Give arguments that verl's main_ppo takes" in said
    )
    assert main(["compat", "--verl", "--config-path", str(tmp_path), "--config-name=mine"]) == 2
