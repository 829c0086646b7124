"""Each row of adapters/verl/refusals.toml refuses a setting, and what its sentence says to do makes verl's driver take it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("verl")  # part of `make setup`

import yaml
from mismatch_ext.adapters.verl.refusals import EXTENSION, LOOPS, TABLE, refused
from omegaconf import DictConfig, OmegaConf

from mismatch_ext.config import MismatchConfig
from tests.peers.verl.prepared import configured

pytestmark = pytest.mark.usefixtures("hydra", "as_with_a_gpu")
ROLES = {"ACTOR": "actor_rollout_ref.actor", "REF": "actor_rollout_ref.ref", "ROLLOUT": "actor_rollout_ref.rollout",
         "MODEL": "actor_rollout_ref.model", "RC": "algorithm.rollout_correction"}  # fmt: skip
SEPARATE = "trainer.v1.trainer_mode=separate_async; actor_rollout_ref.hybrid_engine=False"
FP16, R2, R3 = "mismatch.precision.dtype=float16", "mismatch.routing.mode=R2", "mismatch.routing.mode=R3"
MEGATRON = "model_engine=megatron; ACTOR.strategy=megatron; REF.strategy=megatron; mismatch.monitor.weight_sync='off'"
MASKS = "mismatch.sampling_mask={}; ROLLOUT.top_k=8; ROLLOUT.logprobs_mode=processed_logprobs"
TIS, BYPASS = "mismatch.correction.preset=decoupled_token_is", "mismatch.correction.preset=bypass_ppo_clip"
DROPS = f"{TIS}; mismatch.correction.off_policy_threshold=0.1"
SGLANG = "ROLLOUT.name=sglang"
LORA = "MODEL.lora_rank=8"
# What holds beside the setting, the setting that is refused, and what the sentence says to do.
EXAMPLES = [
    ("", "trainer.use_v1=False", "trainer.use_v1=True"),
    ("", "trainer.v1.trainer_mode=mismatch_x", "trainer.v1.trainer_mode=colocate_async"),
    ("", "ACTOR.strategy=veomni", "ACTOR.strategy=fsdp2"),
    ("", "ROLLOUT.name=trtllm", "ROLLOUT.name=sglang"),
    ("", "ROLLOUT.disaggregation.enabled=True", "ROLLOUT.disaggregation.enabled=False"),
    ("", "ROLLOUT.calculate_log_probs=False", "ROLLOUT.calculate_log_probs=True"),
    ("", "distillation.enabled=True", "distillation.enabled=False"),
    ("", "ROLLOUT.engine_kwargs.vllm.worker_extension_cls=x.Y",
     f"ROLLOUT.engine_kwargs.vllm.worker_extension_cls={EXTENSION}"),
    ("", "VERL_ENGINE_VENDOR=acme", "VERL_ENGINE_VENDOR=''"),
    ("", "ROLLOUT.engine_kwargs.vllm.quantization=fp8",
     "ROLLOUT.engine_kwargs.vllm.quantization=null; ROLLOUT.quantization=fp8"),
    ("", "model_engine=megatron", MEGATRON),
    ("", "model_engine=megatron", "model_engine=dp"),
    ("trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.hybrid_engine=True", SEPARATE),
    ("", "actor_rollout_ref.hybrid_engine=False", "actor_rollout_ref.hybrid_engine=True"),
    ("", "actor_rollout_ref.hybrid_engine=False", SEPARATE),
    (f"{SEPARATE}; mismatch.monitor.weight_sync='off'", "ACTOR.strategy=megatron; REF.strategy=megatron",
     "ACTOR.strategy=fsdp2; REF.strategy=fsdp2"),
    ("trainer.v1.trainer_mode=colocate_async", SGLANG, "ROLLOUT.name=vllm"),
    ("", "REF.strategy=megatron", "REF.strategy=fsdp2"),
    ("mismatch.monitor.alarms={k3_kl: {action: stop}}", "ACTOR.checkpoint.async_save=True",
     "ACTOR.checkpoint.async_save=False"),
    ("mismatch.monitor.alarms={k3_kl: {action: stop}}", "ACTOR.checkpoint.async_save=True",
     "mismatch.monitor.alarms={k3_kl: {action: warn}}"),
    (LORA, "MODEL.target_modules=[q_proj, lm_head]", "MODEL.target_modules=[q_proj]"),
    (LORA, "MODEL.target_modules=[q_proj, lm_head]", "mismatch.monitor.weight_sync='off'"),
    (SGLANG, "ROLLOUT.data_parallel_size=2", "ROLLOUT.data_parallel_size=1"),
    (SGLANG, "ROLLOUT.tensor_model_parallel_size=16", "ROLLOUT.tensor_model_parallel_size=8"),
    (f"{SGLANG}; {R3}", "ROLLOUT.skip_tokenizer_init=False", "ROLLOUT.skip_tokenizer_init=True"),
    (MEGATRON, "mismatch.precision={dtype: bfloat16}", "mismatch.precision=null"),
    (MEGATRON, "mismatch.precision={dtype: bfloat16}", "ACTOR.strategy=fsdp2; REF.strategy=fsdp2; model_engine=dp"),
    (MEGATRON, "mismatch.monitor.weight_sync=warn", "mismatch.monitor.weight_sync='off'"),
    (f"{MEGATRON}; {R3}", "mismatch.routing.reference=True", "mismatch.routing.reference=False"),
    (MEGATRON, "MODEL.use_fused_kernels=True", "MODEL.use_fused_kernels=False"),
    (f"{MEGATRON}; {R3}", "mismatch.routing.measured=1.0", "mismatch.routing.measured=null"),
    (f"{MEGATRON}; {R3}", "MODEL.use_remove_padding=False", "MODEL.use_remove_padding=True"),
    (f"{MEGATRON}; {R3}", "MODEL.mtp.enable=True", "MODEL.mtp.enable=False"),
    (f"{MEGATRON}; {R3}", "ACTOR.megatron.router_replay.mode=R2", "ACTOR.megatron.router_replay.mode=R3"),
    (f"{MEGATRON}; {R3}", "ACTOR.megatron.router_replay.mode=R2", "mismatch.routing=null"),
    (f"{MEGATRON}; {R2}", "ROLLOUT.enable_rollout_routing_replay=True", "ROLLOUT.enable_rollout_routing_replay=False"),
    (f"{MEGATRON}; {R2}", "ROLLOUT.enable_rollout_routing_replay=True", R3),
    (f"{FP16}; {LORA}", "MODEL.lora.merge=True", "MODEL.lora.merge=False"),
    (FP16, "ACTOR.fsdp_config.qat.enable=True", "ACTOR.fsdp_config.qat.enable=False"),
    (FP16, "ROLLOUT.checkpoint_engine.backend=delta_sharded", "ROLLOUT.checkpoint_engine.backend=naive"),
    (FP16, "mismatch.precision.head=float32", "mismatch.precision.head=null"),
    (f"{FP16}; {SGLANG}", "ROLLOUT.engine_kwargs.sglang.quantization=fp8",
     "ROLLOUT.engine_kwargs.sglang.quantization=null; ROLLOUT.quantization=fp8; mismatch.precision.engine_weights=fp8"),
    (FP16, "ROLLOUT.quantization=fp8", "mismatch.precision.engine_weights=fp8"),
    (FP16, "ROLLOUT.engine_kwargs.vllm.kv_cache_dtype=fp8_e4m3", "mismatch.precision.engine_kv_cache=fp8_e4m3"),
    (FP16, "ACTOR.fsdp_config.mixed_precision.param_dtype=bf16", "ACTOR.fsdp_config.mixed_precision.param_dtype=null"),
    (FP16, "REF.fsdp_config.mixed_precision.param_dtype=bf16", "REF.fsdp_config.mixed_precision.param_dtype=null"),
    (FP16, "ROLLOUT.dtype=float32", "ROLLOUT.dtype=null"),
    (FP16, "ROLLOUT.dtype=float32", "mismatch.precision=null"),
    (R3, "ACTOR.fsdp_config.router_replay.mode=R3", "ACTOR.fsdp_config.router_replay=null"),
    (R3, "REF.fsdp_config.router_replay.mode=R3", "REF.fsdp_config.router_replay=null"),
    (MASKS, SGLANG, "ROLLOUT.name=vllm"),
    (f"{MASKS}; mismatch.monitor.weight_sync='off'", "ACTOR.strategy=megatron; REF.strategy=megatron",
     "ACTOR.strategy=fsdp2; REF.strategy=fsdp2"),
    (MASKS, "MODEL.use_fused_kernels=True", "MODEL.use_fused_kernels=False"),
    (MASKS, "ROLLOUT.logprobs_mode=raw_logprobs", "ROLLOUT.logprobs_mode=processed_logprobs"),
    (MASKS, "ROLLOUT.engine_kwargs.vllm.logprobs_mode=raw_logprobs",
     "ROLLOUT.engine_kwargs.vllm.logprobs_mode=processed_logprobs"),
    (MASKS, "ROLLOUT.agent.agent_loop_manager_class=my.Manager", f"ROLLOUT.agent.agent_loop_manager_class={LOOPS}"),
    (MASKS, "ROLLOUT.mtp.enable_rollout=True", "ROLLOUT.mtp.enable_rollout=False"),
    (MASKS, "ACTOR.entropy_coeff=0.01", "ACTOR.entropy_coeff=0"),
    (TIS, "RC.rollout_is=token", "RC.rollout_is=null"),
    (TIS, "RC.rollout_rs=token_k1", "RC.rollout_rs=null"),
    (TIS, "RC.bypass_mode=True", "mismatch.correction=null"),
    ("mismatch.correction={preset: null, level: token, bound: mask, upper: 2.0, mode: decoupled, loss: ppo_clip}",
     "mismatch.correction.level=geometric", "mismatch.correction.level=sequence"),
    ("", "mismatch.correction={preset: dppo_tv}",
     "mismatch.correction=null; ACTOR.policy_loss.loss_mode=dppo_tv; RC.bypass_mode=True; RC.loss_type=ppo_clip"),
    (TIS, "mismatch.correction.centering={}", "mismatch.correction.centering=null"),
    (TIS, "mismatch.correction.veto=1.0e-4", "mismatch.correction.veto=null"),
    (TIS, "mismatch.correction={preset: cis}", TIS),
    (TIS, "mismatch.correction={preset: decoupled_token_is, bound: clip, lower: 0.5}", "mismatch.correction.bound=mask"),
    ("mismatch.correction.preset=bypass_pg_is", "mismatch.correction.normalize=True",
     "mismatch.correction.mode=decoupled; mismatch.correction.loss=ppo_clip"),
    (BYPASS, "ACTOR.policy_loss.loss_mode=gspo", "ACTOR.policy_loss.loss_mode=vanilla"),
    (TIS, "ACTOR.policy_loss.loss_mode=bypass_mode", "ACTOR.policy_loss.loss_mode=gspo"),
    (TIS, "ACTOR.policy_loss.loss_mode=bypass_mode",
     "mismatch.correction.preset=bypass_pg_is; ACTOR.policy_loss.loss_mode=vanilla"),
    (DROPS, "ACTOR.policy_loss.loss_mode=dro", "mismatch.correction.off_policy_threshold=null"),
    (DROPS, "ACTOR.entropy_coeff=0.01", "ACTOR.entropy_coeff=0"),
    ("", "ACTOR.policy_loss.loss_mode=bypass_mode", "RC.bypass_mode=True"),
    ("", "RC.loss_type=reinforce", "RC.bypass_mode=True"),
    ("RC.bypass_mode=True; RC.rollout_is=token", "ACTOR.policy_loss.loss_mode=gspo",
     "ACTOR.policy_loss.loss_mode=vanilla"),
    ("RC.bypass_mode=True; RC.rollout_is=token; ACTOR.policy_loss.loss_mode=bypass_mode",
     "ACTOR.policy_loss.rollout_correction={rollout_is: sequence}", "ACTOR.policy_loss.rollout_correction=null"),
    ("RC.bypass_mode=True", R2, R3),
    ("RC.bypass_mode=True", "mismatch.lr.trigger=mismatch_kl", "mismatch.lr.trigger=response_length"),
    ("", "mismatch.kl.estimator=full", "mismatch.kl.estimator=k3"),
    ("mismatch.kl={reward_path: rewards}", "algorithm.adv_estimator=gdpo", "mismatch.kl.reward_path=surrogate"),
    ("mismatch.kl={reward_path: rewards}", "ACTOR.use_kl_loss=True", "ACTOR.use_kl_loss=False"),
    ("mismatch.kl={}", "algorithm.use_kl_in_reward=True", "mismatch.kl.reward_path=rewards"),
]  # fmt: skip


def settled(plain: DictConfig, *words: str) -> tuple[dict[str, Any], MismatchConfig]:
    """Return verl's configuration and the block with settings, which are divided by semicolons, put into them in order."""
    config = copy.deepcopy(plain)
    config.mismatch = {}
    for word in filter(None, "; ".join(words).split("; ")):
        path, _, value = word.partition("=")
        first, *rest = path.split(".")
        path = ".".join([ROLES.get(first, first), *rest])
        if path.isupper():
            path = f"ray_kwargs.ray_init.runtime_env.env_vars.{path}"
        OmegaConf.update(config, path, yaml.safe_load(value), force_add=True, merge=False)
    found: Any = OmegaConf.to_container(config, resolve=True)
    given = _without_nulls(found.pop("mismatch"))
    block = MismatchConfig.parse(given)
    assert block is not None
    return found, block


def _without_nulls(section: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_nulls(value) if isinstance(value, dict) else value
        for key, value in section.items()
        if value is not None
    }


@pytest.fixture(scope="module")
def plain() -> DictConfig:
    config = configured()
    OmegaConf.set_struct(config, False)
    return config


@pytest.mark.parametrize(("others", "bad", "cure"), EXAMPLES, ids=[f"{bad} -> {cure}" for _, bad, cure in EXAMPLES])
def test_a_row_refuses_its_setting_and_takes_what_it_says_to_do(
    plain: DictConfig, others: str, bad: str, cure: str
) -> None:
    (row, _), *_ = refused(*settled(plain, others, bad))
    first, *rest = bad.partition("=")[0].split(".")
    assert f"{row.path}.".startswith(f"{'.'.join([ROLES.get(first, first), *rest])}.")  # a section's row names its key
    assert list(refused(*settled(plain, others, bad, cure))) == []


def test_every_row_has_an_example(plain: DictConfig) -> None:
    seen = [row for others, bad, _ in EXAMPLES for row, _ in refused(*settled(plain, others, bad))]
    assert [row.path for row in TABLE if row not in seen] == []
