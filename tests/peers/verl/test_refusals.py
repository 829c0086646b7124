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

from mismatch_ext import versions
from mismatch_ext.errors import ConfigError, PeerVersionError, UntestedVersionWarning
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


@pytest.mark.parametrize("trainer", ["one_step_off_policy.main_ppo", "fully_async_policy.fully_async_main"])
def test_verls_other_trainers_are_refused(trainer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"verl.experimental.{trainer}"
    assert Path(verl.__path__[0], "experimental", *trainer.split(".")).with_suffix(".py").is_file()
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    with pytest.raises(
        ConfigError, match=rf"trainer='verl.experimental.{trainer.partition('.')[0]}.*verl.trainer.main_ppo"
    ):
        prepared("+mismatch.precision.dtype=float16")


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
        (("+mismatch.monitor.doctor=first_batch",), "mismatch.monitor.doctor: this key is gone"),
        (("+mismatch.sampling_mask={}", "actor_rollout_ref.rollout.top_k=-1"), "top_p=1, top_k=0 and min_p=0"),
        (
            ("+mismatch.sampling_mask={}", "actor_rollout_ref.rollout.top_p=0.9"),
            "mismatch.sampling_mask.max_support is absent with top_p=0.9, top_k=0",
        ),
        (("+mismatch.rooting.mode=R3",), "rooting"),
        (("+mismatch.correction.preset=bypass_ppo_clip", "+mismatch.routing={mode:R2}"), "mismatch.routing.mode='R2'"),
    ],
)
def test_what_would_do_nothing_is_refused_by_name(overrides: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        prepared("+mismatch.precision.dtype=float16", *overrides)


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
