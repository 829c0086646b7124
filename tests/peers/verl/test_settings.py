"""From the block to verl's own configuration, in the driver: what is set, and a package that does not load."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

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
    assert config.actor_rollout_ref.rollout.custom.mine == 1
    assert block.block_of_server(config.actor_rollout_ref.rollout) == wanted
    assert block.block_of(configured().actor_rollout_ref) is None


def test_verl_imports_our_trainers_beside_a_users_own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    def modules(*overrides: str) -> str:
        variables = prepared("+mismatch={}", *overrides).ray_kwargs.ray_init.runtime_env.env_vars
        return str(variables.VERL_USE_EXTERNAL_MODULES)

    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "mine,other")
    assert modules() == f"mine,other,{settings.TRAINERS}"
    given = "+ray_kwargs.ray_init.runtime_env={env_vars:{VERL_USE_EXTERNAL_MODULES:theirs}}"
    assert modules(given) == f"theirs,{settings.TRAINERS}"


def test_a_section_with_nothing_after_it_on_verls_command_line() -> None:
    def sent(*overrides: str) -> MismatchConfig | None:
        return block.block_of(prepared(*overrides).actor_rollout_ref)

    assert sent("+mismatch.lr={}") == sent("+mismatch={lr: {}}") == MismatchConfig(lr=LrConfig())
    with pytest.raises(ConfigError, match="mismatch.lr: nothing is given"):
        sent("+mismatch.lr=null")


def test_a_megatron_actors_rate_is_led_and_its_schedule_resumed() -> None:
    name = "actor_rollout_ref.actor.optim.use_checkpoint_opt_param_scheduler"
    assert OmegaConf.select(prepared_megatron("+mismatch={}"), name) is False
    config = prepared_megatron("+mismatch.lr.period=5", "+mismatch.routing.mode=R3")
    assert OmegaConf.select(config, name) is True
    assert config.actor_rollout_ref.actor.megatron.router_replay.mode == "R3"


@pytest.mark.parametrize("edit", ["changed", "removed"])
def test_a_config_that_was_edited_after_preparing_is_refused(edit: str) -> None:
    accepted = "actor_rollout_ref.actor.use_dynamic_bsz=True"  # verl's check wants this, or sizes of micro-batches
    config = configured("+mismatch.precision.dtype=float16", accepted)
    check = partial(verl.utils.config.validate_config, use_reference_policy=False, use_critic=False)
    untouched = copy.deepcopy(config)
    check(config)
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


def test_one_flag_makes_both_sides_float16() -> None:
    config = prepared("+mismatch.precision.dtype=float16")
    for role in ("actor", "ref"):
        assert config.actor_rollout_ref[role].fsdp_config.mixed_precision.param_dtype == "fp16"
        assert config.actor_rollout_ref[role].fsdp_config.mixed_precision.reduce_dtype == "fp32"
    assert config.actor_rollout_ref.rollout.dtype == "float16"


def test_routing_switches_on_verls_own_recording_for_r3_alone() -> None:
    name = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
    assert OmegaConf.select(prepared("+mismatch.routing.mode=R3"), name) is True
    assert OmegaConf.select(prepared("+mismatch.routing.mode=R2"), name) is False


@pytest.mark.parametrize(("given", "limit"), [((), 24), (("max_logprobs=64",), 64)])
def test_vllm_may_be_asked_for_as_many_tokens_as_masks_are_read_off(given: tuple[str, ...], limit: int) -> None:
    engine = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    config = prepared(
        "+mismatch.sampling_mask={}",
        "actor_rollout_ref.rollout.top_k=8",
        *(f"+{engine}.{setting}" for setting in given),
    )
    assert OmegaConf.select(config, f"{engine}.max_logprobs") == limit


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
    again = config.copy()
    settings.prepare(again)
    assert again == config


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


HANDED_ON = "actor_rollout_ref.rollout.custom"


def measured(*given: str) -> tuple[set[str], DictConfig]:
    """Prepare a configuration, and return what has changed besides what is handed on, and the configuration."""
    stock, ours = configured(*given), prepared(*given)
    paths = {leaf for config in (stock, ours) for leaf in leaves(OmegaConf.to_container(config, resolve=False))}
    changed = {path for path in paths if OmegaConf.select(stock, path) != OmegaConf.select(ours, path)}
    return {path for path in changed if not path.startswith(HANDED_ON)}, ours


def test_an_empty_config_is_given_and_sets_only_what_it_measures_by() -> None:
    changed, config = measured("+mismatch={}")
    assert changed == MEASURED
    known = block.block_of(config.actor_rollout_ref)
    assert known == MismatchConfig()
    verl.trainer.constants_ppo.get_ppo_ray_runtime_env(config)  # it was read, so nobody refuses it


def test_observe_with_sections_is_prepared_as_the_empty_config_is() -> None:
    changed, config = measured(*EVERY_SECTION)
    assert changed == MEASURED
    rule = {"k3_kl": {"action": "warn"}}  # the alarm is watched, and does not stop
    warned = MismatchConfig.parse({"monitor": {"alarms": rule}})
    assert block.block_of(config.actor_rollout_ref) == warned


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


@pytest.mark.parametrize("given", ["+mismatch={}", "+mismatch.kl.coef=0.1"])
def test_a_default_that_megatron_does_not_allow_is_switched_off_with_a_note(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepared_megatron(given)
    known = block.block_of(config.actor_rollout_ref)
    assert known is not None and known.monitor.weight_sync == "off" and "monitor.weight_sync" not in known.features
    assert "mismatch.monitor.weight_sync='off': weight updates are verified in FSDP" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="monitor.weight_sync='error': weight updates are verified in FSDP"):
        prepared_megatron(given, "+mismatch.monitor.weight_sync=error")
