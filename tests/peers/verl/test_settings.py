"""From the block to verl's own configuration, in the driver: what is set, and a package that does not load."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")  # part of `make setup`

import verl.trainer.constants_ppo
import verl.utils.config
from mismatch_ext.adapters.verl import block, plugin
from mismatch_ext.adapters.verl import config as settings
from omegaconf import DictConfig, OmegaConf, open_dict

from mismatch_ext.config import LrConfig, MismatchConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.patching import active_patches
from tests.peers.verl.prepared import configured, prepared, prepared_megatron

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.usefixtures("hydra", "as_with_a_gpu")


def test_a_manager_of_agent_loops_of_ones_own_stays() -> None:
    setting = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
    masked = prepared("+mismatch.sampling_mask={}", "actor_rollout_ref.rollout.top_k=8")
    assert OmegaConf.select(masked, setting).endswith(".MaskedLoopManager")
    assert OmegaConf.select(prepared("+mismatch={}", f"+{setting}=my.Manager"), setting) == "my.Manager"


def leaves(node: object, path: str = "") -> set[str]:
    if isinstance(node, dict):
        return {leaf for key, value in node.items() for leaf in leaves(value, f"{path}.{key}" if path else str(key))}
    return {path}


def test_the_block_arrives_in_other_processes_as_it_was_given() -> None:
    config = prepared(
        "+mismatch.routing.mode=R3", "+mismatch.lr.period=7", "+actor_rollout_ref.rollout.custom={mine: 1}"
    )
    wanted = MismatchConfig.parse({"routing": {"mode": "R3"}, "lr": {"period": 7}})
    assert block.block_of(config.actor_rollout_ref) == wanted
    rollout = OmegaConf.to_container(
        config.actor_rollout_ref.rollout, resolve=True
    )  # as verl makes its dataclass of it
    assert isinstance(rollout, dict) and rollout["custom"]["mine"] == 1
    assert block.block_of_server(SimpleNamespace(custom=rollout["custom"])) == wanted
    assert block.block_of(configured().actor_rollout_ref) is None
    assert block.block_of_server(SimpleNamespace(custom=None)) is None


def test_verl_imports_our_trainers_beside_a_users_own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    def modules(*overrides: str) -> str:
        variables = prepared("+mismatch={}", *overrides).ray_kwargs.ray_init.runtime_env.env_vars
        return str(variables.VERL_USE_EXTERNAL_MODULES)

    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "mine,other")
    assert modules() == f"mine,other,{settings.TRAINERS}"
    given = "+ray_kwargs.ray_init.runtime_env={env_vars:{VERL_USE_EXTERNAL_MODULES:theirs}}"
    assert modules(given) == f"theirs,{settings.TRAINERS}"


def test_a_variable_of_a_ray_job_that_has_our_trainers_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"runtime_env": {"env_vars": {"VERL_USE_EXTERNAL_MODULES": f"mine,{settings.TRAINERS}"}}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(job))
    assert "env_vars" not in prepared("+mismatch.kl.coef=0.1").ray_kwargs.ray_init.runtime_env


@pytest.mark.parametrize("vendor", ["", "mismatch"])
def test_no_vendor_and_ours_are_taken(vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_ENGINE_VENDOR", vendor)
    assert block.handed_on(prepared("+mismatch={}"))


def test_what_is_refused_is_not_handed_on() -> None:
    config = configured("+mismatch.lr={}", "+ray_kwargs.ray_init.runtime_env={env_vars:{VERL_ENGINE_VENDOR:acme}}")
    with pytest.raises(ConfigError, match="VERL_ENGINE_VENDOR='acme'"):
        settings.prepare(config)
    assert not block.handed_on(config)


def test_a_section_with_nothing_after_it_on_verls_command_line() -> None:
    def sent(*overrides: str) -> MismatchConfig | None:
        return block.block_of(prepared(*overrides).actor_rollout_ref)

    assert sent("+mismatch.lr={}") == sent("+mismatch={lr: {}}") == MismatchConfig(lr=LrConfig())
    for nothing, said in (("null", "nothing is given"), ("''", "'' is not allowed; allowed: a mapping")):
        for name in ("lr", "precision", "monitor"):
            with pytest.raises(ConfigError, match=f"mismatch.{name}: {said}"):
                sent(f"+mismatch.{name}={nothing}")


def test_null_switches_a_key_of_a_preset_off_on_verls_command_line() -> None:
    preset = "+mismatch.correction.preset=slime_mis"
    with pytest.raises(ConfigError, match=r"mismatch\.correction\.veto=0\.0001"):
        prepared(preset)
    config = prepared(preset, "+mismatch.correction.veto=null")
    native = config.algorithm.rollout_correction
    assert (native.rollout_is, native.rollout_is_threshold, native.rollout_is_batch_normalize) == ("token", 2.0, True)
    arrived = block.block_of(config.actor_rollout_ref)
    assert arrived is not None and arrived.correction is not None and arrived.correction.veto is None


def test_verl_checks_the_reference_that_the_block_asks_for() -> None:
    config = configured("+mismatch.kl.coef=0.1")
    assert settings.prepare(config) == {"use_reference_policy": True}
    assert config.actor_rollout_ref.actor.use_kl_loss


@pytest.mark.parametrize(("mode", "warns"), [("seq-mean-token-mean", True), ("token-mean", False)])
def test_a_kl_in_a_mean_over_each_response_is_warned_of(
    mode: str, warns: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    settings.prepare(configured("+mismatch.kl.coef=0.1", f"actor_rollout_ref.actor.loss_agg_mode={mode}"))
    assert ("docs/kl.md" in capsys.readouterr().out) == warns


def test_a_megatron_actor_keeps_verls_own_replay() -> None:
    config = prepared_megatron("+mismatch.routing.mode=R3")
    assert config.actor_rollout_ref.actor.megatron.router_replay.mode == "R3"
    assert config.actor_rollout_ref.rollout.enable_rollout_routing_replay


def test_a_megatron_actors_rate_is_led_and_its_schedule_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    name = "actor_rollout_ref.actor.optim.use_checkpoint_opt_param_scheduler"
    assert OmegaConf.select(prepared_megatron("+mismatch={}"), name) is False
    assert name not in capsys.readouterr().out
    config = prepared_megatron("+mismatch.lr.period=5", "+mismatch.routing.mode=R3")
    assert OmegaConf.select(config, name) is True
    assert config.actor_rollout_ref.actor.megatron.router_replay.mode == "R3"
    assert f"{name}=True: with mismatch.lr" in capsys.readouterr().out


def test_preparing_twice_is_preparing_once() -> None:
    config = prepared("+mismatch.precision.dtype=float16")
    again = config.copy()
    settings.prepare(again)
    assert again == config


@pytest.mark.parametrize("edit", ["changed", "removed"])
def test_a_config_that_was_edited_after_preparing_is_refused(edit: str) -> None:
    accepted = "actor_rollout_ref.actor.use_dynamic_bsz=True"  # verl's check wants this, or sizes of micro-batches
    config = configured("+mismatch.precision.dtype=float16", accepted)
    check = partial(verl.utils.config.validate_config, use_reference_policy=False, use_critic=False)
    untouched = copy.deepcopy(config)
    check(config)
    check(config)  # as verl's own task runner may do
    verl.trainer.constants_ppo.get_ppo_ray_runtime_env(config)
    with open_dict(config):
        if edit == "changed":
            config.mismatch.precision.dtype = "bfloat16"
        else:
            del config.mismatch
    for start in (check, verl.trainer.constants_ppo.get_ppo_ray_runtime_env):
        with pytest.raises(ConfigError, match=rf"was {edit} after verl's validate_config had read it.*copy\.deepcopy"):
            start(config)
    # A copy that was made before is another run's.
    with open_dict(untouched):
        untouched.mismatch.precision.dtype = "bfloat16"
    check(untouched)
    arrived = block.block_of(untouched.actor_rollout_ref)
    assert arrived is not None and arrived.precision is not None and arrived.precision.dtype == "bfloat16"


def test_one_flag_makes_both_sides_float16(capsys: pytest.CaptureFixture[str]) -> None:
    config = prepared("+mismatch.precision.dtype=float16")
    for role in ("actor", "ref"):
        assert config.actor_rollout_ref[role].fsdp_config.mixed_precision.param_dtype == "fp16"
        assert config.actor_rollout_ref[role].fsdp_config.mixed_precision.reduce_dtype == "fp32"
    assert config.actor_rollout_ref.rollout.dtype == "float16"
    assert "mixed_precision.param_dtype=fp16 for actor and reference" in capsys.readouterr().out


def test_other_keys_of_mixed_precision_stay_and_the_dtype_is_the_blocks() -> None:
    setting = "+actor_rollout_ref.actor.fsdp_config.mixed_precision={reduce_dtype:bf16}"
    found = prepared("+mismatch.precision.dtype=float16", setting).actor_rollout_ref.actor.fsdp_config.mixed_precision
    assert (found.param_dtype, found.reduce_dtype) == ("fp16", "bf16")


def test_routing_switches_on_verls_own_recording_for_r3_alone() -> None:
    name = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
    assert OmegaConf.select(prepared("+mismatch.routing.mode=R3"), name) is True
    assert OmegaConf.select(prepared("+mismatch.routing.mode=R2"), name) is False


@pytest.mark.parametrize(
    ("given", "limit"), [((), 24), (("max_logprobs=20",), 24), (("max_logprobs=64",), 64), (("max_logprobs=-1",), -1)]
)
def test_vllm_may_be_asked_for_as_many_tokens_as_masks_are_read_off(given: tuple[str, ...], limit: int) -> None:
    engine = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    config = prepared(
        "+mismatch.sampling_mask={}",
        "actor_rollout_ref.rollout.top_k=8",
        *(f"+{engine}.{setting}" for setting in given),
    )
    assert OmegaConf.select(config, f"{engine}.max_logprobs") == limit
    untouched = prepared("+mismatch.precision.dtype=float16", "actor_rollout_ref.rollout.top_k=8")
    assert OmegaConf.select(untouched, f"{engine}.max_logprobs") is None


@pytest.mark.parametrize(
    ("mode", "updates", "name"),
    [
        ("sync", 1, "mismatch"),
        ("colocate_async", 1, "mismatch_colocate_async"),
        ("separate_async", 4, "mismatch_separate_async"),
    ],
)
def test_each_mode_is_given_the_trainer_of_its_name_and_workers_are_told(mode: str, updates: int, name: str) -> None:
    hybrid = f"actor_rollout_ref.hybrid_engine={mode != 'separate_async'}"
    config = prepared(f"trainer.v1.trainer_mode={mode}", hybrid, "+mismatch={}")
    assert config.trainer.v1.trainer_mode == name
    assert block.mode_of(config.actor_rollout_ref) == block.RunMode(name=mode, updates=updates)
    settings.prepare(config)  # twice is once
    assert config.trainer.v1.trainer_mode == name


@pytest.mark.parametrize(
    "overrides",
    [
        ("+mismatch.precision.engine_weights=fp8", "actor_rollout_ref.rollout.quantization=fp8"),
        ("actor_rollout_ref.actor.strategy=fsdp", "actor_rollout_ref.ref.strategy=fsdp"),
        ("actor_rollout_ref.ref.strategy=fsdp",),
        ("actor_rollout_ref.model.use_fused_kernels=True",),
        ("actor_rollout_ref.rollout.data_parallel_size=2",),
        ("actor_rollout_ref.rollout.expert_parallel_size=2",),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config={method:ngram,num_speculative_tokens:2}",),
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",),
    ],
)
def test_verls_own_settings_are_taken_with_every_section(overrides: tuple[str, ...]) -> None:
    config = prepared("+mismatch.precision.dtype=float16", "+mismatch.routing.mode=R3", "+mismatch.lr={}", *overrides)
    stock = configured(*overrides)
    for name in ("actor.strategy", "ref.strategy", "model.use_fused_kernels", "rollout.data_parallel_size"):
        key = f"actor_rollout_ref.{name}"
        assert OmegaConf.select(config, key) == OmegaConf.select(stock, key)


def test_verls_own_command_composes_the_smallest_block_of_the_page() -> None:
    overrides = ["+mismatch={}", "+mismatch.monitor.weight_sync=warn"]
    done = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *overrides, "--cfg", "job"],
        capture_output=True, text=True, timeout=300, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "VERL_USE_EXTERNAL_PLUGINS": "auto"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert OmegaConf.create(done.stdout).mismatch == {"monitor": {"weight_sync": "warn"}}


def test_a_package_that_cannot_be_loaded_keeps_blocks_from_running(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ImportError("no such thing")

    monkeypatch.setattr(plugin, "_load", fail)
    with pytest.raises(ImportError):
        plugin.load()
    # A program that has started Ray itself calls the first alone.
    for refusing in (verl.utils.config.validate_config, verl.trainer.constants_ppo.get_ppo_ray_runtime_env):
        with pytest.raises(SystemExit, match="no such thing") as refused:
            refusing(configured("+mismatch={}"))
        assert "nothing was started" in str(refused.value)
    verl.trainer.constants_ppo.get_ppo_ray_runtime_env(configured())  # without a block verl trains
    plugin.unload()
    assert active_patches() == []


EVERY_SECTION = (
    "+mismatch.level=observe",
    "+mismatch.precision.dtype=float16",
    "+mismatch.routing.mode=R3",
    "+mismatch.correction.preset=bypass_ppo_clip",
    "+mismatch.kl.coef=0.1",
    "+mismatch.lr={}",
    "+mismatch.monitor.alarms={k3_kl:{action:stop}}",
)
MEASURED = {
    "trainer.v1.trainer_mode",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls",
    "ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES",
}


HANDED_ON = ("actor_rollout_ref.mismatch", "actor_rollout_ref.rollout.custom")


def measured(*given: str) -> tuple[set[str], DictConfig]:
    """Prepare a configuration, and return what has changed besides what is handed on, and the configuration."""
    stock, ours = configured(*given), prepared(*given)
    paths = {leaf for config in (stock, ours) for leaf in leaves(OmegaConf.to_container(config, resolve=False))}
    changed = {path for path in paths if OmegaConf.select(stock, path) != OmegaConf.select(ours, path)}
    return {path for path in changed if not path.startswith(HANDED_ON)}, ours


def test_an_empty_config_is_given_and_sets_only_what_it_measures_by() -> None:
    assert configured("+mismatch={}").mismatch == {} and configured().get("mismatch") is None
    changed, config = measured("+mismatch={}")
    assert changed == MEASURED
    known = block.block_of(config.actor_rollout_ref)
    assert known == MismatchConfig() and block.block_of_server(config.actor_rollout_ref.rollout) == known
    verl.trainer.constants_ppo.get_ppo_ray_runtime_env(config)  # it was read, so nobody refuses it


def test_observe_with_sections_is_prepared_as_the_empty_config_is() -> None:
    changed, config = measured(*EVERY_SECTION)
    of_empty, empty = measured("+mismatch={}")
    assert changed == of_empty == MEASURED
    expected = block.block_of(empty.actor_rollout_ref)
    assert expected is not None
    rule = {"k3_kl": {"action": "warn"}}  # the alarm is watched, and does not stop
    warned = MismatchConfig.parse({"monitor": {"alarms": rule}})
    assert block.block_of(config.actor_rollout_ref) == warned
    for group in (config.actor_rollout_ref, empty.actor_rollout_ref):
        group.mismatch = group.rollout.custom = config.mismatch = empty.mismatch = None
    assert config == empty


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("trainer.v1.trainer_mode=separate_async", "trainer_mode"),
        ("trainer.use_v1=False", "use_v1"),
        ("actor_rollout_ref.rollout.calculate_log_probs=False", "calculate_log_probs"),
        ("+ray_kwargs.ray_init.runtime_env={env_vars:{VERL_ENGINE_VENDOR:acme}}", "VERL_ENGINE_VENDOR"),
    ],
)
def test_a_run_that_cannot_be_measured_is_stock_and_says_so(override: str, named: str) -> None:
    for given in ("+mismatch={}",), EVERY_SECTION:
        with pytest.warns(UserWarning, match=f"nothing is measured, and verl trains without the config.*{named}"):
            changed, config = measured(*given, override)
        assert config.mismatch is None and {path for path in changed if not path.startswith("mismatch")} == set()
        verl.trainer.constants_ppo.get_ppo_ray_runtime_env(config)  # nobody refuses it later
    with pytest.raises(ConfigError, match=named):  # a config that acts
        prepared("+mismatch.kl.coef=0.1", override)


def test_a_correction_of_verls_own_that_does_nothing_is_named_and_the_run_is_measured() -> None:
    inert = "algorithm.rollout_correction.loss_type=reinforce"
    with pytest.warns(UserWarning, match="measured as it is, but look at this setting.*loss_type.*no effect in verl"):
        changed, config = measured("+mismatch={}", inert)
    assert changed == MEASURED and config.mismatch is not None
    with pytest.raises(ConfigError, match="no effect in verl"):
        prepared("+mismatch.kl.coef=0.1", inert)


def test_a_config_that_only_measures_leaves_out_keys_of_the_monitor_that_are_refused() -> None:
    with pytest.warns(UserWarning, match="monitor.weight_sync='warn' is left out: weight updates are verified in FSDP"):
        config = prepared_megatron("+mismatch.monitor.weight_sync=warn")
    known = block.block_of(config.actor_rollout_ref)
    assert known is not None and known.monitor.weight_sync == "off"


@pytest.mark.parametrize("given", ["+mismatch={}", "+mismatch.kl.coef=0.1"])
def test_a_default_that_megatron_does_not_allow_is_switched_off_with_a_note(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepared_megatron(given)
    known = block.block_of(config.actor_rollout_ref)
    assert known is not None and known.monitor.weight_sync == "off" and "monitor.weight_sync" not in known.features
    assert "mismatch.monitor.weight_sync='off': weight updates are verified in FSDP" in capsys.readouterr().out
    for asked in ("error", "warn"):
        if given == "+mismatch={}" and asked == "warn":
            continue  # that does not act, as above
        with pytest.raises(ConfigError, match=f"monitor.weight_sync='{asked}': weight updates are verified in FSDP"):
            prepared_megatron(given, f"+mismatch.monitor.weight_sync={asked}")


def test_a_block_that_cannot_be_read_is_an_error_under_observe_too() -> None:
    with pytest.raises(ConfigError, match="rooting"):
        prepared("+mismatch.level=observe", "+mismatch.rooting.mode=R3")
