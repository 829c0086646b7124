"""Configurations of verl that are refused before Ray starts, by the setting's name, the version's, or the seam's."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("verl")  # part of `make setup`

import ray
import verl.utils.config
from mismatch_ext.adapters import compat
from mismatch_ext.adapters.verl import config as settings
from mismatch_ext.adapters.verl.refusals import derives, refuse

from mismatch_ext import versions
from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError, MismatchError, PeerVersionError, UntestedVersionWarning
from tests.peers.verl.composed import composed
from tests.peers.verl.prepared import configured, prepared, prepared_megatron

KNOWN_WRONG = versions.KNOWN_WRONG
pytestmark = pytest.mark.usefixtures("hydra", "as_with_a_gpu")


def test_a_program_that_starts_ray_without_verls_check_is_refused() -> None:
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    get_ppo_ray_runtime_env(configured())
    with pytest.raises(ConfigError, match="would train without it"):
        get_ppo_ray_runtime_env(configured("+mismatch={}"))
    get_ppo_ray_runtime_env(prepared("+mismatch={}"))


@pytest.mark.parametrize(
    "trainer", ["one_step_off_policy.main_ppo", "fully_async_policy.fully_async_main", "separation.ray_trainer"]
)
def test_verls_other_trainers_are_refused(trainer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"verl.experimental.{trainer}"
    assert Path(verl.__path__[0], "experimental", *trainer.split(".")).with_suffix(".py").is_file()
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    with pytest.raises(
        ConfigError, match=rf"trainer='verl.experimental.{trainer.partition('.')[0]}.*verl.trainer.main_ppo"
    ):
        prepared("+mismatch.precision.dtype=float16")


def test_a_class_is_known_to_be_derived_from_ours_by_its_name() -> None:
    own = "logging.Handler"
    assert derives(own, own) and derives("logging.StreamHandler", own) and derives("logging.handlers.QueueHandler", own)
    for name in ("logging.Logger", "logging.INFO", "logging.NoSuchHandler", "no.such.module", "Handler", ""):
        assert not derives(name, own), name


def test_asynchronous_modes_run_with_vllm_alone() -> None:
    sglang = "actor_rollout_ref.rollout.name=sglang"
    with pytest.raises(ConfigError, match="rollout.name='sglang': asynchronous modes"):
        refuse(configured("trainer.v1.trainer_mode=colocate_async", sglang), MismatchConfig())
    refuse(configured(sglang), MismatchConfig())


SECTIONS = {
    "monitor": "{}", "monitor.weight_sync": "{weight_sync: warn}",
    "precision": "{dtype: float16}", "lr": "{}", "kl": "{coef: 0.1}", "correction": "{preset: decoupled_token_is}",
    "sampling_mask": "{}", "routing.R2": "{mode: R2}", "routing.R3": "{mode: R3}",
}  # fmt: skip


@pytest.mark.parametrize("host", ["verl + vLLM", "verl + SGLang", "verl Megatron + vLLM"])
def test_compat_says_no_where_the_driver_refuses_and_nowhere_else(host: str, sglang_is: Callable[[str], None]) -> None:
    sglang_is("0.5.18")
    table = compat.installed_environment()["hosts"][host]
    if "Megatron" in host and versions.installed("megatron-core") is None:  # as with verl's own pins
        assert table.keys() == {"not_installed"}
        return
    assert table.keys() == SECTIONS.keys()
    overrides = ["actor_rollout_ref.rollout.name=sglang"] if "SGLang" in host else []
    if "Megatron" in host:
        overrides += ["model_engine=megatron", "actor_rollout_ref.model.use_remove_padding=True"]
    for feature, section in SECTIONS.items():
        mine = [f"+mismatch.{feature.partition('.')[0]}={section}", "actor_rollout_ref.rollout.top_k=8"]
        mine.append("++mismatch.monitor.alarms={k3_kl:{action:stop}}")  # otherwise the driver only warns
        if feature != "monitor.weight_sync":
            mine.append("++mismatch.monitor.weight_sync='off'")
        config = composed("algorithm.adv_estimator=grpo", *overrides, *mine)
        try:
            settings.prepare(config)
        except ConfigError as error:
            assert table[feature] is not None and table[feature].startswith("Refused by name: "), (feature, error)
        else:
            assert table[feature] is None, feature


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("trainer.use_v1=False",), "trainer.use_v1=False"),
        (("trainer.v1.trainer_mode=mismatch",), "trainer.v1.trainer_mode='mismatch'"),
        (("trainer.v1.trainer_mode=mismatch_separate_async",), "trainer.v1.trainer_mode='mismatch_separate_async'"),
        (("trainer.v1.trainer_mode=separate_async",), "actor_rollout_ref.hybrid_engine=True"),
        (("actor_rollout_ref.hybrid_engine=False",), "actor_rollout_ref.hybrid_engine=False"),
        (
            ("trainer.v1.trainer_mode=colocate_async", "actor_rollout_ref.hybrid_engine=False"),
            "actor_rollout_ref.hybrid_engine=False",
        ),
        (
            ("trainer.v1.trainer_mode=colocate_async", "actor_rollout_ref.actor.strategy=megatron"),
            "actor_rollout_ref.actor.strategy='megatron'",
        ),
        (("+mismatch.monitor.doctor=first_batch",), "mismatch.monitor.doctor: this key is gone"),
        (("actor_rollout_ref.actor.strategy=veomni",), "actor_rollout_ref.actor.strategy='veomni'"),
        (("actor_rollout_ref.rollout.name=trtllm",), "actor_rollout_ref.rollout.name='trtllm'"),
        (("actor_rollout_ref.rollout.calculate_log_probs=False",), "calculate_log_probs=False"),
        (("+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=x.Y",), "worker_extension_cls='x.Y'"),
        (("+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:bf16}",), "param_dtype='bf16'"),
        (("actor_rollout_ref.rollout.dtype=float32",), "actor_rollout_ref.rollout.dtype='float32'"),
        (("actor_rollout_ref.actor.fsdp_config.qat.enable=True",), "fsdp_config.qat.enable=True"),
        (("actor_rollout_ref.rollout.checkpoint_engine.backend=delta_sharded",), "backend='delta_sharded'"),
        (("actor_rollout_ref.rollout.quantization=fp8",), "rollout.quantization='fp8'"),
        (
            ("+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=fp8_e4m3",),
            "engine_kwargs.vllm.kv_cache_dtype='fp8_e4m3': mismatch.precision",
        ),
        (
            ("+mismatch.routing.mode=R3", "+actor_rollout_ref.actor.fsdp_config.router_replay.mode=R2"),
            "actor.fsdp_config.router_replay.mode='R2'",
        ),
        (
            (
                "+mismatch.precision.engine_weights=fp8",
                "actor_rollout_ref.rollout.quantization=fp8",
                "+actor_rollout_ref.rollout.engine_kwargs.vllm.quantization=fp8_per_channel",
            ),
            "rollout.engine_kwargs.vllm.quantization='fp8_per_channel': verl would load",
        ),
        (("+mismatch.precision.engine_weights=fp8_per_channel",), "rollout.quantization=None: mismatch.precision"),
        (
            ("+actor_rollout_ref.rollout.engine_kwargs.vllm.quantization=fp8_per_channel",),
            "Set actor_rollout_ref.rollout.quantization instead",
        ),
        (("+mismatch.routing={mode:R2}", "algorithm.rollout_correction.bypass_mode=True"), "mode='R2'"),
        *(
            (
                ("+mismatch.sampling_mask={}", "actor_rollout_ref.rollout.top_k=8", *overrides),
                named,
            )
            for overrides, named in (
                (
                    ("actor_rollout_ref.actor.entropy_coeff=0.01",),
                    "actor.entropy_coeff=0.01: mismatch.sampling_mask",
                ),
                (
                    ("actor_rollout_ref.model.use_fused_kernels=True",),
                    "actor_rollout_ref.model.use_fused_kernels=True: a fused head",
                ),
                (
                    ("actor_rollout_ref.rollout.logprobs_mode=raw_logprobs",),
                    "actor_rollout_ref.rollout.logprobs_mode='raw_logprobs': mismatch.sampling_mask",
                ),
                (
                    ("+actor_rollout_ref.rollout.engine_kwargs.vllm.logprobs_mode=raw_logprobs",),
                    "engine_kwargs.vllm.logprobs_mode='raw_logprobs': mismatch.sampling_mask",
                ),
                (
                    ("++actor_rollout_ref.rollout.agent.agent_loop_manager_class=my.Manager",),
                    "agent.agent_loop_manager_class='my.Manager': this package's class joins masks",
                ),
                (
                    ("++actor_rollout_ref.rollout.mtp.enable_rollout=True",),
                    "actor_rollout_ref.rollout.mtp.enable_rollout=True: mismatch.sampling_mask",
                ),
                (("actor_rollout_ref.rollout.top_k=-1",), "top_p=1, top_k=0 and min_p=0"),
            )
        ),
        (
            ("+mismatch.sampling_mask={}", "actor_rollout_ref.rollout.top_p=0.9"),
            "mismatch.sampling_mask.max_support is absent with top_p=0.9, top_k=0",
        ),
        (("+mismatch.kl.estimator=full",), "mismatch.kl.estimator='full'"),
        (("+mismatch.rooting.mode=R3",), "rooting"),
        (("+mismatch.precision.head=float32",), "mismatch.precision.head='float32': no engine of verl 0.9.1"),
        (("actor_rollout_ref.ref.strategy=megatron",), "actor_rollout_ref.ref.strategy='megatron'"),
        (("+mismatch.correction.preset=bypass_ppo_clip", "+mismatch.routing={mode:R2}"), "mismatch.routing.mode='R2'"),
        (
            ("+mismatch.correction.preset=bypass_ppo_clip", "+mismatch.lr={trigger:f_tau}"),
            "mismatch.lr.trigger='f_tau'",
        ),
        (("+ray_kwargs.ray_init.runtime_env={env_vars:{VERL_ENGINE_VENDOR:acme}}",), "VERL_ENGINE_VENDOR='acme'"),
    ],
)
def test_what_would_do_nothing_is_refused_by_name(overrides: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        prepared("+mismatch.precision.dtype=float16", *overrides)


def test_an_adapter_on_the_head_is_refused_where_probes_would_be_scored_without_it() -> None:
    lora = ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.actor.strategy=fsdp2")
    named = "actor_rollout_ref.model.target_modules=[q_proj,lm_head]"
    with pytest.raises(ConfigError, match="model.target_modules: vLLM scores prompts without an adapter on the output"):
        prepared("+mismatch.lr={}", *lora, named)
    prepared("+mismatch.lr={}", *lora, "actor_rollout_ref.model.target_modules=[q_proj,v_proj]")
    prepared("+mismatch.lr={}", "+mismatch.monitor.weight_sync=off", *lora, named)
    with pytest.warns(UserWarning, match="scores prompts without an adapter on the output head"):
        prepared("+mismatch={}", *lora, named)


def test_a_key_value_format_that_the_block_names_is_taken() -> None:
    prepared(
        "+mismatch.precision={dtype:float16,engine_kv_cache:fp8_e4m3}",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=fp8_e4m3",
    )


def test_a_strategy_that_the_model_engine_has_no_settings_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="model_engine='megatron': .*Set .*strategy=megatron"):
        prepared_megatron(
            "+mismatch.lr={}", "actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.ref.strategy=fsdp2"
        )


@pytest.mark.parametrize(
    "refused",
    [
        "+mismatch.precision.dtype=bfloat16",
        "+mismatch.monitor.weight_sync=warn",
        "actor_rollout_ref.model.use_fused_kernels=True",
        "+mismatch.sampling_mask={max_support:8}",
        "+mismatch.routing.reference=True",
        "+mismatch.routing.measured=1.0",
        "actor_rollout_ref.model.use_remove_padding=False",
        "++actor_rollout_ref.model.mtp.enable=True",
        "actor_rollout_ref.actor.megatron.router_replay.mode=R2",
    ],
)
def test_what_a_megatron_actor_cannot_do_is_refused(refused: str) -> None:
    named = re.match(r"\+*(mismatch\.\w+|[\w.]+)", refused)
    assert named is not None
    with pytest.raises(ConfigError, match=re.escape(named[1])):
        prepared_megatron("+mismatch.routing.mode=R3", refused)
    with pytest.raises(ConfigError, match="enable_rollout_routing_replay=True: .*mismatch.routing"):
        prepared_megatron("+mismatch.routing.mode=R2", "actor_rollout_ref.rollout.enable_rollout_routing_replay=True")


def test_an_alarm_does_not_stop_a_run_whose_checkpoint_would_only_be_begun() -> None:
    saved = "actor_rollout_ref.actor.checkpoint.async_save=True"
    with pytest.raises(ConfigError, match=r"async_save=True: an alarm .*action: warn"):
        prepared_megatron(saved, "+mismatch.monitor.alarms={k3_kl:{action:stop}}")
    prepared_megatron(saved, "+mismatch.monitor.alarms={k3_kl:{action:warn}}")
    prepared_megatron("+mismatch.monitor.alarms={k3_kl:{action:stop}}")
    observed = prepared_megatron(saved, "+mismatch.monitor.alarms={k3_kl:{action:stop}}", "+mismatch.level=observe")
    assert observed.mismatch is not None  # the alarm stops nothing there


SGLANG = ("actor_rollout_ref.rollout.name=sglang", "+mismatch.routing.mode=R3")


def test_r3_is_refused_before_ray_starts_where_vllms_routes_are_known_to_be_wrong(
    installed_is: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "KNOWN_WRONG", KNOWN_WRONG)
    installed_is("vllm", "0.24.0")
    with pytest.raises(
        PeerVersionError, match=r"vllm 0\.24\.0: mismatch\.routing\.R3 does not work on a CPU.*all zero"
    ):
        prepared("+mismatch.routing.mode=R3")
    assert prepared("+mismatch.routing.mode=R2", "+mismatch.kl={}") is not None
    assert not ray.is_initialized()


def test_a_version_of_vllm_below_the_oldest_is_refused_before_ray_starts(
    installed_is: Callable[[str, str], None],
) -> None:
    installed_is("vllm", "0.23.0")
    config = configured("+mismatch.lr={}")
    with pytest.raises(PeerVersionError, match="vllm 0.23.0 is outside the supported range"):
        # verl's driver calls it by this name before it starts Ray.
        verl.utils.config.validate_config(config, use_reference_policy=False, use_critic=False)
    assert not ray.is_initialized()


def test_a_version_that_nobody_has_run_is_prepared_for_with_one_warning(
    installed_is: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = ("+mismatch.routing.mode=R3", "+mismatch.precision.dtype=float16")
    known = prepared(*blocks)
    monkeypatch.setattr("mismatch_ext.versions._TOLD", set())
    installed_is("vllm", "0.99.0")
    with pytest.warns(UntestedVersionWarning, match=r"untested with vllm 0.99.0; the \d+ seams in use hold") as told:
        assert prepared(*blocks) == known == prepared(*blocks)
    assert len(told) == 1
    with pytest.raises(PeerVersionError, match="weight_sync='off' with vllm 0.99.0"):
        prepared(*blocks, "+mismatch.monitor.weight_sync='off'")
    with pytest.raises(PeerVersionError, match="trainer's weights. Install what was run"):
        prepared_megatron("+mismatch.lr={}")  # there it is off in any case


def test_replay_is_refused_with_a_megatron_core_whose_checkpoints_are_not_known(
    installed_is: Callable[[str, str], None],
) -> None:
    installed_is("megatron-core", "0.18.0")
    for mode in ("R2", "R3"):
        with pytest.raises(PeerVersionError, match=rf"megatron-core 0\.18\.0: mismatch\.routing\.{mode} does not work"):
            prepared_megatron(f"+mismatch.routing.mode={mode}")
    with pytest.warns(UntestedVersionWarning, match="untested with megatron-core 0.18.0"):
        prepared_megatron("+mismatch.kl={}")


def test_sglang_needs_no_extension_class(sglang_is: Callable[[str], None]) -> None:
    sglang_is("0.5.18")
    config = prepared(*SGLANG)
    assert "vllm" not in (config.actor_rollout_ref.rollout.engine_kwargs or {}) or not (
        config.actor_rollout_ref.rollout.engine_kwargs.vllm or {}
    ).get("worker_extension_cls")
    assert config.actor_rollout_ref.rollout.enable_rollout_routing_replay


@pytest.mark.parametrize(
    ("version", "override", "named"),
    [
        ("0.5.23", "trainer.nnodes=1", "sglang 0.5.23: it does not work under verl"),
        ("0.5.18", "actor_rollout_ref.rollout.skip_tokenizer_init=False", "skip_tokenizer_init=False"),
        ("0.5.18", "actor_rollout_ref.rollout.disaggregation.enabled=True", "disaggregation.enabled=True"),
        ("0.5.18", "actor_rollout_ref.rollout.data_parallel_size=2", "data_parallel_size=2"),
        ("0.5.18", "+mismatch.sampling_mask={}", "actor_rollout_ref.rollout.name='sglang': mismatch.sampling_mask"),
        (
            "0.5.18",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=16",
            "tensor_model_parallel_size=16: an SGLang replica",
        ),
    ],
)
def test_what_sglang_cannot_do_under_verl_is_refused(
    sglang_is: Callable[[str], None], version: str, override: str, named: str
) -> None:
    sglang_is(version)
    with pytest.raises(MismatchError) as error:
        prepared(*SGLANG, override)
    assert re.search(named, str(error.value))
    if "tensor_model" in override:
        prepared(*SGLANG, "actor_rollout_ref.rollout.tensor_model_parallel_size=8")
        prepared(*SGLANG, override, "trainer.n_gpus_per_node=16")


def test_sglang_is_quantized_as_verl_quantizes_what_it_sends(sglang_is: Callable[[str], None]) -> None:
    sglang_is("0.5.18")
    own = "+actor_rollout_ref.rollout.engine_kwargs.sglang.quantization=fp8"
    asked = (*SGLANG, "+mismatch.precision={dtype:bfloat16,engine_weights:fp8}")
    with pytest.raises(
        ConfigError, match=r"engine_kwargs\.sglang\.quantization='fp8'.* set .*rollout\.quantization='fp8'"
    ):
        prepared(*asked, own)
    for rest in ((), (own,)):
        prepared(*asked, "actor_rollout_ref.rollout.quantization=fp8", *rest)
