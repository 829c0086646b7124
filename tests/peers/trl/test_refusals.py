"""What TRL's adapter refuses, and when: by the configuration, before the model is loaded, before the engine is started.

All in one process, with the real TRL and transformers. Nothing here starts an engine: the first attempt is an error.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import os
import pickle
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mismatch_ext.errors import (
    ConfigError,
    MismatchError,
    PeerVersionError,
    PrecisionError,
    ReplayError,
    RoutingError,
    RunDirectoryError,
    SeamError,
)
from mismatch_ext.presets import PRESETS
from mismatch_ext.versions import PEERS
from tests.models import tiny_model

Make = Callable[..., Any]
R3 = {"routing": {"mode": "R3"}}
MASKS: dict[str, Any] = {"sampling_mask": {}}
FP16 = {"precision": {"dtype": "float16"}}
HEAD = {"precision": {"dtype": "bfloat16", "head": "float32"}}
SURGE = {"lr": {}}
NOWHERE = "/nowhere/model"  # whoever loads it fails with an OSError


class EngineStarted(Exception):
    """TRL has come to start its engine: nothing was refused before."""


@pytest.fixture(scope="module")
def peers() -> Any:
    """Return the scenarios' arguments and rewards, and with them the real TRL: importing it takes long."""
    return importlib.import_module("tests.peers.trl.scenarios_training")


@pytest.fixture(autouse=True)
def environment_as_it_was() -> Iterator[None]:
    """Take back what TRL sets before it starts an engine: as one rank of one, whatever runs next would open a port."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True, scope="module")
def no_process_group_left() -> Iterator[None]:
    """End the process group that such a variable has started here."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def no_engine(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an engine that would be started fail."""

    def started(*args: Any, **kwargs: Any) -> None:
        raise EngineStarted

    monkeypatch.setattr("vllm.LLM.__init__", started)


@pytest.fixture
def configure(peers: Any, tmp_path: Path) -> Make:
    """Return a function that makes a configuration: with an engine, unless told otherwise."""
    adapter = importlib.import_module("mismatch_ext.adapters.trl")

    def make(block: Any, kind: str = "MismatchGRPOConfig", **overrides: Any) -> Any:
        given = peers.arguments(str(tmp_path / "run"), mismatch=block, **{"bf16": None, **overrides})
        if kind == "MismatchRLOOConfig":
            given = {k: v for k, v in given.items() if not k.startswith("vllm_importance")}
        return getattr(adapter, kind)(**given)

    return make


@pytest.fixture
def construct(peers: Any, configure: Make) -> Make:
    """Return a function that constructs a trainer with a block."""
    adapter = importlib.import_module("mismatch_ext.adapters.trl")

    def make(model: Any, block: Any, options: dict[str, Any] | None = None, **overrides: Any) -> Any:
        return adapter.MismatchGRPOTrainer(
            model=str(model) if isinstance(model, Path) else model,
            reward_funcs=peers.graded,
            args=configure(block, **overrides),
            train_dataset=peers.rows(),
            **(options or {}),
        )

    return make


# Who refuses, the block, what else is given, and words of the error, which is a ConfigError unless they name another.
FULL = {"kl": {"coef": 0.1, "estimator": "full"}}
IN_REWARDS = {"kl": {"coef": 0.1, "reward_path": "rewards"}}
GROWING = {"precision": {"dtype": "float16", "growth_interval": 100}}
NVME = {"zero_optimization": {"offload_param": {"device": "nvme"}}}
LAYERWISE = {"optim": "galore_adamw_layerwise"}
RLOO = {"kind": "MismatchRLOOConfig"}
CASES: list[tuple[str, Any, dict[str, Any], list[str]]] = [
    (
        "config",
        SURGE,
        {"generation_kwargs": {"temperature": 0.5}},
        ["['temperature']=0.5 but temperature=1.0", "remove it"],
    ),
    ("config", SURGE, {"generation_kwargs": {"logprobs": 5}}, ["generation_kwargs['logprobs']=5", "allowed: 0"]),
    ("config", SURGE, {"generation_kwargs": {"n": 2}}, ["generation_kwargs['n']=2", "allowed: 1"]),
    ("config", SURGE, {"generation_kwargs": '{"n": 2}'}, ["generation_kwargs['n']=2"]),  # as on a command line
    ("config", MASKS, {"top_k": 4, "temperature": 0.0}, ["RecordError", "sampling temperature=0.0", "allowed: > 0"]),
    ("config", SURGE, {"top_p": 1.5}, ["RecordError", "sampling top_p=1.5", "allowed: 0 < x <= 1"]),
    ("config", {}, {"use_vllm": False}, ["use_vllm=False with a mismatch block without"]),
    ("config", FP16, {"bf16": True}, ["bf16=True contradicts mismatch.precision.dtype='float16'"]),
    ("config", HEAD, RLOO, ["mismatch.precision.head with MismatchRLOOConfig", "use MismatchGRPOConfig"]),
    ("launch", HEAD, {"deepspeed": {}}, ["PrecisionError", "precision.head='float32' with DeepSpeed", "leave it out"]),
    ("config", SURGE, LAYERWISE, ["mismatch.lr with optim='galore_adamw_layerwise'"]),
    ("config", {"lr": {"trigger": "mismatch_kl"}}, {"use_vllm": False}, ["use_vllm=False with mismatch.lr.trigger="]),
    ("config", {"kl": {"coef": 0.1}}, RLOO, ["mismatch.kl with MismatchRLOOConfig"]),
    ("config", R3, {"vllm_tensor_parallel_size": 2}, ["vllm_tensor_parallel_size=2"]),
    ("config", R3, {"use_vllm": False}, ["mismatch.routing.mode='R3' with use_vllm=False", "mode='R2'"]),
    ("config", {"routing": {"mode": "R3", "reference": True}}, {}, ["reference=True with beta=0"]),
    ("config", MASKS, {}, ["top_p=1, top_k=0 and min_p=0", "nothing is cut off"]),
    ("config", MASKS, {"top_p": 0.9}, ["mismatch.sampling_mask.max_support is absent", "set max_support"]),
    ("config", MASKS, {"generation_kwargs": {"min_p": 0.1}}, ["max_support is absent", "min_p=0.1"]),
    ("config", MASKS, {"top_k": 4, "vllm_mode": "server"}, ["vllm_mode='server'", "allowed: vllm_mode='colocate'"]),
    ("config", MASKS, {"top_k": 4, "use_vllm": False}, ["use_vllm=False with mismatch.sampling_mask"]),
    ("config", MASKS, {"top_k": 4, **RLOO}, ["mismatch.sampling_mask with MismatchRLOOConfig"]),
    ("config", FULL, {}, ["mismatch.kl.estimator='full'", "set it to k1, k2, k3 or abs", "mismatch_ext.kl_full"]),
    ("config", {"sampling_mask": {"max_support": 1}}, {}, ["max_support", "greater than or equal to 2"]),
    # The real DeepSpeed is in test_deepspeed, and FSDP in test_ranks.
    ("launch", GROWING, {"deepspeed": {}}, ["PrecisionError", "precision.growth_interval", "fp16.initial_scale_power"]),
    (
        "launch",
        FP16,
        {"deepspeed": {"torch_autocast": {"enabled": True}}},
        ["PrecisionError", "torch_autocast", "Remove"],
    ),
    ("launch", SURGE, {"deepspeed": {"scheduler": {}}}, ["mismatch.lr with a scheduler in DeepSpeed's"]),
    ("launch", {}, {"deepspeed": NVME}, ["weight updates with zero_optimization.offload_param.device='nvme'"]),
    ("launch", SURGE, {"fsdp": 1}, ["weight updates with fsdp_version=1", "fsdp_version: 2"]),
    # By the trainer, before it loads the model.
    ("trainer", IN_REWARDS, {"options": {"tools": [len]}}, ["kl.reward_path='rewards' with tools", "'surrogate'"]),
    # By the callback, in a trainer of TRL's own, before the engine.
    ("callback", SURGE, {"logging_steps": 2}, ["logging_steps=2", "set logging_steps=1"]),
    ("callback", SURGE, {"logging_strategy": "epoch"}, ["logging_strategy='epoch'"]),
    ("callback", SURGE, LAYERWISE, ["mismatch.lr with optim='galore_adamw_layerwise'"]),
    ("callback", SURGE, {"number": 2}, ["2 MismatchCallbacks on one trainer"]),
    ("callback", R3, {}, ["mismatch.routing with MismatchCallback", "allowed: lr, monitor"]),
    ("callback", {"lr": {"trigger": "f_tau"}}, {}, ["mismatch.lr.trigger='f_tau' with MismatchCallback", "grad_norm"]),
]


@pytest.fixture
def by_callback(peers: Any, dense: Path, tmp_path: Path) -> Make:
    """Return a function that constructs TRL's own trainer with our callback."""
    from mismatch_ext.adapters.trl import MismatchCallback
    from trl import GRPOConfig, GRPOTrainer

    def make(block: Any, number: int = 1, **overrides: Any) -> Any:
        return GRPOTrainer(
            model=str(dense),
            reward_funcs=peers.graded,
            args=GRPOConfig(**peers.arguments(str(tmp_path), eval_strategy="steps", eval_steps=1, **overrides)),
            train_dataset=peers.rows(),
            eval_dataset=peers.rows(2),
            callbacks=[MismatchCallback(block) for _ in range(number)],
        )

    return make


def test_ligers_loss_is_refused_where_a_bad_row_would_keep_its_kl(
    configure: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl import GRPOTrainer

    acts: dict[str, Any] = {"monitor": {"weight_sync": "error"}}
    given = {"use_liger_kernel": True, "beta": 0.1}
    if not hasattr(GRPOTrainer, "compute_liger_loss"):
        # Kernels within the model, as later versions have them, leave the loss to TRL.
        configure(acts, **given)
        monkeypatch.setattr(GRPOTrainer, "compute_liger_loss", None, raising=False)
    with pytest.raises(ConfigError, match=r"use_liger_kernel=True and beta=0\.1: .*would keep its KL; set use_liger"):
        configure(acts, **given)
    configure(acts, **given | {"beta": 0.0})
    configure({}, **given)
    configure(acts, **given, kind="MismatchRLOOConfig")


@pytest.mark.parametrize(("who", "block", "given", "words"), CASES)
def test_what_is_refused(
    configure: Make, construct: Make, by_callback: Make, who: str, block: Any, given: dict[str, Any], words: list[str]
) -> None:
    from mismatch_ext.adapters.trl.refusals import check_sharding

    from mismatch_ext.config import MismatchConfig

    ways: dict[str, Make] = {
        "config": configure,
        "launch": lambda block, deepspeed=None, fsdp=None: check_sharding(
            MismatchConfig.parse(block), deepspeed=deepspeed, fsdp=fsdp
        ),
        "trainer": lambda block, **given: construct(NOWHERE, block, **given),
        "callback": by_callback,
    }
    with pytest.raises(MismatchError) as refusal:
        ways[who](block, **given)
    said = f"{type(refusal.value).__name__}: {refusal.value}"
    kind = next((word for word in words if word.endswith("Error")), "ConfigError")
    assert said.startswith(f"{kind}: ") and all(word in said for word in words), said


def test_a_section_with_nothing_after_it_through_trls_own_parser(peers: Any, tmp_path: Path) -> None:
    from mismatch_ext.adapters.trl import MismatchGRPOConfig
    from trl import TrlParser

    from mismatch_ext.config import LrConfig

    file = tmp_path / "config.yaml"
    common = f"output_dir: {tmp_path}/run\nuse_vllm: false\nuse_cpu: true\nbf16: false\n"
    for text, argv in (("mismatch: {lr: {}}\n", []), ("", ["--mismatch", "lr: {}"])):
        file.write_text(common + text)
        (config,) = TrlParser(MismatchGRPOConfig).parse_args_and_config(["--config", str(file), *argv])
        assert config.mismatch_block().lr == LrConfig(), (text, argv)
    for text, argv in (("mismatch:\n  lr:\n", []), ("", ["--mismatch", '{"lr": null}']), ("", ["--mismatch", "lr:"])):
        file.write_text(common + text)
        with pytest.raises(ConfigError, match="mismatch.lr: nothing is given"):
            TrlParser(MismatchGRPOConfig).parse_args_and_config(["--config", str(file), *argv])
    with pytest.raises(ConfigError, match="'lr' is given twice"):
        file.write_text(common)
        TrlParser(MismatchGRPOConfig).parse_args_and_config(
            ["--config", str(file), "--mismatch", '{"lr": {"period": 5}, "lr": {}}']
        )


@pytest.mark.parametrize(
    ("section", "mixed", "computes"),
    [
        ({"fp16": {"enabled": True}}, "no", "float16"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, "bf16", "bfloat16"),
        ({}, "fp16", "float16"),
        ({"bf16": {"enabled": False}}, "bf16", None),
    ],
)
def test_what_deepspeed_will_compute_in_is_read_off_its_configuration(
    peers: Any, section: Any, mixed: str, computes: str | None
) -> None:
    from mismatch_ext.adapters.accelerate.deepspeed import read_deepspeed

    state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config=section))
    accelerator: Any = SimpleNamespace(
        state=state, mixed_precision=mixed, device=torch.device("cpu"), num_processes=1
    )  # fmt: skip
    reading = read_deepspeed(accelerator, torch.nn.Linear(2, 2))
    assert (reading.autocast_dtype, reading.parameter_dtypes) == (computes, {"float32": 6})
    assert (reading.scaler is not None) == (computes == "float16")


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers' arguments say that DeepSpeed trains, and nothing come to build it."""
    from transformers import TrainingArguments

    settle = TrainingArguments.__post_init__

    def settled(self: Any) -> None:
        settle(self)
        self.deepspeed_plugin = SimpleNamespace(zero_stage=3, deepspeed_config={"scheduler": {}})

    monkeypatch.setattr(TrainingArguments, "__post_init__", settled)


def test_a_schedule_may_be_built_before_its_trainer(configure: Make) -> None:
    assert configure(SURGE, warmup_steps=3).get_warmup_steps(10) == 3


@pytest.mark.usefixtures("deepspeed")
@pytest.mark.parametrize("kind", ["MismatchGRPOConfig", "MismatchRLOOConfig"])
def test_the_configuration_asks_whether_deepspeed_trains(configure: Make, kind: str) -> None:
    with pytest.raises(ConfigError, match="mismatch.lr with a scheduler"):
        configure(SURGE, kind)


@pytest.mark.usefixtures("deepspeed")
def test_the_callback_asks_whether_deepspeed_trains(peers: Any, tmp_path: Path) -> None:
    from mismatch_ext.adapters.trl import MismatchCallback
    from transformers import TrainerControl, TrainerState
    from trl import GRPOConfig

    arguments = GRPOConfig(**peers.arguments(str(tmp_path)))
    with pytest.raises(ConfigError, match="mismatch.lr with MismatchCallback and DeepSpeed"):
        MismatchCallback(SURGE).on_init_end(arguments, TrainerState(), TrainerControl())


# By the trainer, before it loads the model.


def test_a_run_directory_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    construct: Make, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("taken")
    with pytest.raises(RunDirectoryError, match="mismatch.monitor.run_dir"):
        construct(NOWHERE, {"lr": {}, "monitor": {"run_dir": str(tmp_path / "file" / "sub")}})
    assert (tmp_path / "file").read_text() == "taken"


def test_a_peer_outside_its_range_is_refused_by_the_range_before_the_model_is_loaded(
    construct: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another trl as importlib.metadata sees it: an older one in front on the path.
    info = tmp_path / "site" / "trl-1.12.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 1.12.0\n")
    monkeypatch.syspath_prepend(info.parent)
    with pytest.raises(PeerVersionError) as refusal:
        construct(NOWHERE, FP16)
    assert f"trl 1.12.0 is outside the supported range {PEERS['trl'].supports}" in str(refusal.value)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (None, "GRPOTrainer._calculate_rewards is not there"),
        (
            lambda self, prompts, inputs: None,
            r"GRPOTrainer._calculate_rewards takes \(prompts, inputs\), not inputs, prompts",
        ),
    ],
)
def test_a_trainer_without_a_method_that_ours_overrides_is_refused(
    construct: Make, monkeypatch: pytest.MonkeyPatch, changed: Any, words: str
) -> None:
    from trl import GRPOTrainer

    if changed is None:
        monkeypatch.delattr(GRPOTrainer, "_calculate_rewards")
    else:
        monkeypatch.setattr(GRPOTrainer, "_calculate_rewards", changed)
    with pytest.raises(SeamError, match=f"{words}.*pip install trl=="):
        construct(NOWHERE, SURGE)


def test_gmpo_is_refused_what_its_loss_has_no_seam_for_before_the_model_is_loaded(peers: Any, configure: Make) -> None:
    from tests.peers.trl.scenarios_online import gmpo

    with pytest.raises(ConfigError, match="mismatch.correction with Trainer: GMPOTrainer's loss"):
        gmpo(NOWHERE, str(configure({}).output_dir), {"correction": {"preset": "token_truncate"}})


def test_asyncgrpo_is_refused_with_what_works_instead(peers: Any, configure: Make, tmp_path: Path) -> None:
    from mismatch_ext.adapters.trl import MismatchConfigMixin, MismatchTrainerMixin, attach
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    @dataclass
    class Config(MismatchConfigMixin, AsyncGRPOConfig):  # type: ignore[misc]  # fields of GRPO's own
        """TRL's configuration with a block."""

    class Trainer(MismatchTrainerMixin, AsyncGRPOTrainer):  # type: ignore[misc]  # methods of GRPO's own
        """TRL's trainer with a block."""

    def refused(name: str) -> Any:
        message = (
            rf"AsyncGRPO \({name}\): .* use MismatchGRPOTrainer, or verl's modes colocate_async and separate_async\."
        )
        return pytest.raises(ConfigError, match=message)

    with refused("Config"):
        Config(output_dir=str(tmp_path), use_cpu=True, bf16=False, mismatch={})
    with refused("Trainer"):
        Trainer(NOWHERE, args=configure({}), reward_funcs=peers.graded)
    with refused("AsyncGRPOTrainer"):
        attach(object.__new__(AsyncGRPOTrainer))


# By the trainer, before it starts the engine.


def changed(dense: Path, name: str, value: float) -> Any:
    """Return the tiny model with one weight changed."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    with torch.no_grad():
        model.get_submodule(name).weight[3, 4] = value
    return model


@pytest.mark.parametrize("loaded", [False, True])
def test_routing_refuses_a_dense_model_before_the_engine(construct: Make, dense: Path, loaded: bool) -> None:
    model = changed(dense, "model.layers.1.mlp.up_proj", 0.0) if loaded else dense
    with pytest.raises(ReplayError) as refusal:
        construct(model, R3)
    for words in ("mismatch.routing.mode='R3': qwen3: no module of the model has experts", "Remove mismatch.routing"):
        assert words in str(refusal.value)


def test_a_checkpoint_that_does_not_fit_float16_is_refused_before_the_engine(construct: Make, dense: Path) -> None:
    model = changed(dense, "model.layers.1.mlp.up_proj", 1e5)  # float16 ends at 65504
    with pytest.raises(PrecisionError) as refusal:
        construct(model, FP16)
    assert "up_proj" in str(refusal.value) and "mismatch.precision.readiness='warn'" in str(refusal.value)
    with pytest.raises(EngineStarted):
        construct(model, {"precision": {"dtype": "float16", "readiness": "warn"}})


def test_half_precision_masters_are_refused_before_the_engine(construct: Make, dense: Path) -> None:
    with pytest.raises(PrecisionError) as refusal:
        construct(changed(dense, "model.layers.1.mlp.up_proj", 0.0).to(torch.bfloat16), FP16)
    assert "trainer parameters: expected float32, found bfloat16" in str(refusal.value)
    for given in ({"dtype": "bfloat16"}, '{"dtype": "bfloat16"}'):  # as on a command line
        with pytest.raises(PrecisionError, match="trainer parameters: expected float32, found bfloat16"):
            construct(dense, FP16, model_init_kwargs=given)


def test_a_pass_over_images_is_refused_under_replay(peers: Any) -> None:
    from mismatch_ext.adapters.trl.replay import ScoreReplay

    replay: Any = object.__new__(ScoreReplay)
    shown = {"pixel_values": torch.zeros(1), "image_grid_thw": None, "compute_entropy": True}
    for score in (replay.replay, replay.record):
        with pytest.raises(RoutingError, match=r"mismatch.routing with multimodal inputs \(pixel_values\)"):
            score(None, None, (None, None, 1), (), "train", **shown)


def test_autocast_that_the_launch_switched_on_is_refused_with_trls_own_settings(
    construct: Make, dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(PrecisionError) as refusal:
        construct(dense, {"precision": {"dtype": "float32"}})
    assert "trainer autocast: expected none, found bfloat16" in str(refusal.value)
    assert "Turn mixed precision off (fp16=False, bf16=False)" in str(refusal.value)


def test_a_block_given_to_a_trainer_that_ignores_it_is_refused_before_the_engine(
    peers: Any, configure: Make, dense: Path
) -> None:
    from trl import GRPOTrainer

    given: dict[str, Any] = {"model": str(dense), "reward_funcs": peers.graded, "train_dataset": peers.rows()}
    for block in (FP16, {}, {"level": "observe", **FP16}):
        with pytest.raises(ConfigError, match="Use MismatchGRPOTrainer"):
            GRPOTrainer(args=configure(block), **given)
    served = configure(SURGE, use_vllm=False, bf16=False)
    peers.MismatchGRPOTrainer(args=served, **given)
    with pytest.raises(ConfigError, match="Use MismatchGRPOTrainer"):
        GRPOTrainer(args=served, **given)


def test_a_block_is_not_ignored_where_the_trainer_reads_its_settings_elsewhere(
    peers: Any, configure: Make, dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers.trainer
    from trl import GRPOTrainer

    # A later release may move what its constructor does with a setting into a function.
    plain, moved = textwrap.dedent(inspect.getsource(transformers.Trainer.__init__)), dict(vars(transformers.trainer))
    assert "args.train_batch_size" in plain
    moved["read"] = lambda args: args.train_batch_size
    exec(plain.replace("args.train_batch_size", "read(args)"), moved)
    monkeypatch.setattr(transformers.Trainer, "__init__", moved["__init__"])
    model = transformers.AutoModelForCausalLM.from_pretrained(dense)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    given: dict[str, Any] = {"reward_funcs": peers.graded, "train_dataset": peers.rows()}
    tokenizer = transformers.AutoTokenizer.from_pretrained(dense)
    options: dict[str, Any] = {"optimizers": (optimizer, schedule), "processing_class": tokenizer}
    args = configure(SURGE, use_vllm=False, bf16=False)
    with pytest.raises(ConfigError, match="Use MismatchGRPOTrainer"):
        GRPOTrainer(model=model, args=args, **options, **given).train()
    # Whoever only reads the settings does not train.
    without = dataclasses.replace(args, mismatch=None, generation_batch_size=None)
    assert args.train_batch_size == without.train_batch_size == 8
    assert copy.deepcopy(args).to_dict() == pickle.loads(pickle.dumps(args)).to_dict()
    assert args.to_dict()["accelerator_config"] == without.to_dict()["accelerator_config"]
    assert dataclasses.asdict(args)["accelerator_config"] == dataclasses.asdict(without)["accelerator_config"]
    GRPOTrainer(model=model, args=without, **options, **given)


def test_our_trainer_with_trls_own_configuration_says_that_nothing_is_measured(peers: Any, dense: Path) -> None:
    from mismatch_ext.adapters.trl import MismatchGRPOTrainer
    from trl import GRPOConfig

    config = GRPOConfig(**peers.arguments("nowhere", use_vllm=False, bf16=False))
    with pytest.warns(UserWarning, match="MismatchGRPOTrainer with GRPOConfig.*MismatchGRPOConfig"):
        MismatchGRPOTrainer(str(dense), peers.graded, args=config, train_dataset=peers.rows())


def test_a_device_without_float64_is_refused_where_log_probabilities_are_compared(peers: Any) -> None:
    from mismatch_ext.adapters.trl.refusals import check_device

    from mismatch_ext.config import MismatchConfig

    lr, kl = MismatchConfig.parse({"lr": {}}), MismatchConfig.parse({"kl": {}})
    for block, engine in ((kl, False), (lr, True)):
        with pytest.raises(ConfigError, match=r"device 'mps', which has no float64; allowed: a CPU"):
            check_device("mps", block, engine=engine)
        check_device("cuda", block, engine=engine)
    check_device("mps", lr, engine=False)


def test_the_callback_beside_a_block_is_refused(peers: Any, construct: Make, dense: Path) -> None:
    from mismatch_ext.adapters.trl import MismatchCallback

    with pytest.raises(ConfigError, match="on a trainer that has a mismatch block already"):
        construct(dense, SURGE, {"callbacks": [MismatchCallback(SURGE)]})


# And nothing else.


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_correction_preset_comes_to_its_engine(construct: Make, dense: Path, preset: str) -> None:
    with pytest.raises(EngineStarted):
        construct(dense, {"correction": {"preset": preset}}, vllm_importance_sampling_mode="sequence_mask")


@pytest.mark.parametrize(
    "block",
    [
        {},
        FP16,
        {"precision": {"dtype": "float32"}},
        R3,
        {"kl": {"coef": 0.1}},
        {"kl": {"coef": 0.1, "reward_path": "rewards"}},
        SURGE,
    ],
    ids=str,
)
def test_every_section_comes_to_its_engine(construct: Make, moe: Path, block: Any) -> None:
    with pytest.raises(EngineStarted):
        construct(moe, block)


# The output head in float32, of models that tie it and of others.


def test_adapters_on_a_model_with_a_tied_head_are_refused_before_trl_fails(construct: Make, tmp_path: Path) -> None:
    """TRL's own option looks for the embeddings where adapters hide them."""
    from peft import LoraConfig

    lora: dict[str, Any] = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])}
    tied, untied = (tiny_model("dense", tmp_path / name, tied=name == "tied") for name in ("tied", "untied"))
    with pytest.raises(
        ConfigError, match=r"mismatch\.precision\.head with adapters on a model that ties its output head"
    ):
        construct(tied, HEAD, lora)
    for model, options in ((untied, lora), (tied, {}), (untied, {})):
        with pytest.raises(EngineStarted):
            construct(model, HEAD, options)


def test_the_section_sets_trls_own_option_of_the_head(configure: Make) -> None:
    assert configure(HEAD).cast_lm_head_to_fp32
    assert not configure({"precision": {"dtype": "bfloat16"}}).cast_lm_head_to_fp32


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("exact", [True, False])
def test_what_trls_fused_head_multiplies_in_is_read_off_a_product(tied: bool, exact: bool, tmp_path: Path) -> None:
    from mismatch_ext.adapters.trl.head import read_fused_head
    from transformers import AutoModelForCausalLM
    from trl.trainer import utils

    if not hasattr(utils, "add_fused_lm_head"):
        pytest.skip("this TRL has no fused head")
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model("dense", tmp_path / "model", tied=tied), dtype=torch.float32
    )
    utils.add_fused_lm_head(model, cast_lm_head_to_fp32=exact)
    tokens = torch.arange(2, 12)[None]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = model(input_ids=tokens, labels=tokens, fused_lm_head=True).log_probs
        hidden = model.model(input_ids=tokens).last_hidden_state[:, :-1]
    logits = (hidden.float() @ model.lm_head.weight.T).log_softmax(-1)
    expected = logits.gather(-1, tokens[:, 1:, None])[..., 0]
    assert bool(torch.allclose(found, expected, atol=1e-5)) == exact  # also where the head is tied
    dtype = read_fused_head(model, lambda: torch.autocast("cpu", torch.bfloat16))
    assert dtype == ("float32" if exact else "bfloat16")
