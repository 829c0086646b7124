"""What TRL's adapter refuses, and when: by the configuration, before the model is loaded, before the engine is started.

All in one process, with the real TRL and transformers. Nothing here starts an engine: the first attempt is an error.
"""

from __future__ import annotations

import importlib
import os
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
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
from mismatch_ext.versions import PEERS
from tests.commands import ROOT
from tests.models import tiny_model

Make = Callable[..., Any]
R3 = {"routing": {"mode": "R3"}}
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


REFUSED = tomllib.loads((ROOT / "tests/data/trl/refused.toml").read_text(encoding="utf-8"))["refused"]


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
    monkeypatch.setattr(GRPOTrainer, "compute_liger_loss", None, raising=False)  # not in every version
    with pytest.raises(ConfigError, match=r"use_liger_kernel=True and beta=0\.1: .*would keep its KL; set use_liger"):
        configure(acts, **given)
    configure({}, **given)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case['who']}: {case['words'][-1]}")
def test_what_is_refused(configure: Make, construct: Make, by_callback: Make, case: dict[str, Any]) -> None:
    from mismatch_ext.adapters.trl.refusals import check_sharding

    from mismatch_ext.config import MismatchConfig

    ways: dict[str, Make] = {
        "config": configure,
        "launch": lambda block, deepspeed=None, fsdp=None: check_sharding(
            MismatchConfig.parse(block), deepspeed=deepspeed, fsdp=fsdp
        ),
        "trainer with tools": lambda block: construct(NOWHERE, block, {"tools": [len]}),
        "callback": by_callback,
    }
    with pytest.raises(MismatchError) as refusal:
        ways[case["who"]](case["block"], **case.get("given", {}))
    said = f"{type(refusal.value).__name__}: {refusal.value}"
    kind = next((word for word in case["words"] if word.endswith("Error")), "ConfigError")
    assert said.startswith(f"{kind}: ") and all(word in said for word in case["words"]), said


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
    file.write_text(common + "mismatch:\n  lr:\n")
    with pytest.raises(ConfigError, match="mismatch.lr: nothing is given"):
        TrlParser(MismatchGRPOConfig).parse_args_and_config(["--config", str(file)])


def test_a_schedule_may_be_built_before_its_trainer(configure: Make) -> None:
    assert configure(SURGE, warmup_steps=3).get_warmup_steps(10) == 3


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


def test_a_trainer_whose_method_takes_other_arguments_is_refused(
    construct: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl import GRPOTrainer

    monkeypatch.setattr(GRPOTrainer, "_calculate_rewards", lambda self, prompts, inputs: None)
    words = r"GRPOTrainer._calculate_rewards takes \(prompts, inputs\), not inputs, prompts"
    with pytest.raises(SeamError, match=f"{words}.*pip install trl=="):
        construct(NOWHERE, SURGE)


def test_gmpo_is_refused_what_its_loss_has_no_seam_for_before_the_model_is_loaded(peers: Any, configure: Make) -> None:
    from tests.peers.trl.scenarios_online import gmpo

    with pytest.raises(ConfigError, match="mismatch.correction with Trainer: GMPOTrainer's loss"):
        gmpo(NOWHERE, str(configure({}).output_dir), {"correction": {"preset": "token_truncate"}})


def test_asyncgrpo_is_refused_with_what_works_instead(peers: Any, configure: Make) -> None:
    from mismatch_ext.adapters.trl import MismatchTrainerMixin, attach
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    class Trainer(MismatchTrainerMixin, AsyncGRPOTrainer):  # type: ignore[misc]  # methods of GRPO's own
        """TRL's trainer with a block."""

    with pytest.raises(ConfigError, match=r"AsyncGRPO \(Trainer\): .* use MismatchGRPOTrainer"):
        Trainer(NOWHERE, args=configure({}), reward_funcs=peers.graded)
    with pytest.raises(ConfigError, match=r"AsyncGRPO \(AsyncGRPOTrainer\): .* use MismatchGRPOTrainer"):
        attach(object.__new__(AsyncGRPOTrainer))


# By the trainer, before it starts the engine.


def changed(dense: Path, name: str, value: float) -> Any:
    """Return the tiny model with one weight changed."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    with torch.no_grad():
        model.get_submodule(name).weight[3, 4] = value
    return model


def test_routing_refuses_a_dense_model_before_the_engine(construct: Make, dense: Path) -> None:
    with pytest.raises(ReplayError, match=r"mismatch.routing.mode='R3': qwen3: no module of the model has experts"):
        construct(dense, R3)


def test_a_checkpoint_that_does_not_fit_float16_is_refused_before_the_engine(construct: Make, dense: Path) -> None:
    model = changed(dense, "model.layers.1.mlp.up_proj", 1e5)  # float16 ends at 65504
    with pytest.raises(PrecisionError, match=r"(?s)up_proj.*mismatch.precision.readiness='warn'"):
        construct(model, FP16)
    with pytest.raises(EngineStarted):
        construct(model, {"precision": {"dtype": "float16", "readiness": "warn"}})


def test_half_precision_masters_are_refused_before_the_engine(construct: Make, dense: Path) -> None:
    with pytest.raises(PrecisionError, match="trainer parameters: expected float32, found bfloat16"):
        construct(dense, FP16, model_init_kwargs={"dtype": "bfloat16"})


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
    with pytest.raises(PrecisionError, match="trainer autocast: expected none, found bfloat16"):
        construct(dense, {"precision": {"dtype": "float32"}})


def test_a_block_given_to_a_trainer_that_ignores_it_is_refused_before_the_engine(
    peers: Any, configure: Make, dense: Path
) -> None:
    from trl import GRPOTrainer

    given: dict[str, Any] = {"model": str(dense), "reward_funcs": peers.graded, "train_dataset": peers.rows()}
    for block in (FP16, {}):
        with pytest.raises(ConfigError, match="Use MismatchGRPOTrainer"):
            GRPOTrainer(args=configure(block), **given)


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
    with pytest.raises(EngineStarted):
        construct(untied, HEAD, lora)


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
