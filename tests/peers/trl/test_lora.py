"""LoRA under TRL: every section of the block, the base's weights over 200 weight updates, and adapters that get lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mismatch_ext.adapters.trl.lora import Base, check_base, check_tied, layers_of
from peft import LoraConfig, TrainableTokensConfig, get_peft_model
from transformers import AutoModelForCausalLM

from mismatch_ext.errors import ConfigError, WeightSyncError
from tests.peers.scenarios import Run, named
from tests.peers.trl.test_everything import BALANCED, EVERYTHING

scenarios = named("tests.peers.trl.scenarios_lora")

pytestmark = [pytest.mark.engine, pytest.mark.numeric]
# The doctor examines one thing at a time: it does not go with masks.
BLOCK = EVERYTHING | {"sampling_mask": {}, "monitor": {"default_alarms": False}}


def test_every_section_runs_on_adapters(run: Run, moe: Path, tmp_path: Path) -> None:
    run(
        scenarios.sections, model=moe, out=tmp_path, block=BLOCK, top_p=0.9, top_k=8, max_steps=3,
        model_init_kwargs={"dtype": "float32", "experts_implementation": "eager"}, **BALANCED,
    ).expect()  # fmt: skip


def test_the_base_stays_as_it_is_and_an_adapter_that_is_not_merged_is_named(
    run: Run, dense: Path, tmp_path: Path
) -> None:
    run(scenarios.drift, model=dense, out=tmp_path).expect()


def adapted_model(dense: Path, config: Any = None) -> tuple[Any, Base]:
    """Return a model in bfloat16 with adapters that have learned something, and what sends it."""
    torch.manual_seed(0)
    loaded = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.bfloat16)
    model = get_peft_model(loaded, config or LoraConfig(r=2, target_modules=["q_proj", "o_proj"]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    return model, Base(model, "bfloat16")


def as_trl_sends(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights as TRL 1.16 does of a model with adapters."""
    model.merge_adapter()
    for name, parameter in model.named_parameters():
        if model.prefix not in name:
            yield name, parameter.data
    model.unmerge_adapter()


@pytest.mark.parametrize("kind", ["lora", "tied rows"])
def test_the_engine_gets_what_trl_merges(dense: Path, kind: str) -> None:
    model, base = adapted_model(dense, TrainableTokensConfig(token_indices=[1, 2]) if kind == "tied rows" else None)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    ours = {name: values.clone() for name, values in base.with_adapters(lambda: as_trl_sends(model))}
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    theirs = {name: values.clone() for name, values in as_trl_sends(model)}
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert any(not torch.equal(ours[name], before[name]) for name in ours)
    if kind == "lora":
        assert base.rounding is not None and 0 < base.rounding < 1


@pytest.mark.parametrize("adapted_layers", [1, 3])
def test_an_update_that_breaks_off_leaves_the_base_unmerged(dense: Path, adapted_layers: int) -> None:
    model, base = adapted_model(dense)
    before = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    sent = base.with_adapters(lambda: as_trl_sends(model))
    while adapted_layers:
        adapted_layers -= "base_layer" in next(sent)[0]
    sent.close()  # as Python does with a generator that an error has left behind
    assert all(torch.equal(parameter, old) for parameter, old in before)
    assert not any(layer.merged for layer, _ in layers_of(model))


def test_adapters_that_were_not_sent_are_named(dense: Path) -> None:
    model, base = adapted_model(dense)
    copies = lambda: ((name, values.clone()) for name, values in as_trl_sends(model))  # noqa: E731
    with pytest.raises(WeightSyncError, match="the engine has got the base alone"):
        deque(base.with_adapters(copies), maxlen=0)


def test_a_quantized_base_is_refused(dense: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(dense)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    check_base(adapted)
    base = model.model.layers[1].self_attn.q_proj.get_base_layer()
    base.weight = torch.nn.Parameter((base.weight * 99).to(torch.int8), requires_grad=False)
    with pytest.raises(ConfigError, match=r"Linear.weight holds torch.int8.*Load the base in bfloat16"):
        check_base(adapted)


ADAPTERS: dict[str, tuple[Any, bool]] = {
    "layers": (LoraConfig(r=2, target_modules=["q_proj"]), True),
    "rows of both": (TrainableTokensConfig(token_indices=[1, 2]), True),
    "embeddings": (LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"]), False),
    "a head of its own": (LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]), False),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_on_one_of_two_tied_layers_are_refused(dense: Path, untied: Path, name: str) -> None:
    config, fits_tied = ADAPTERS[name]
    check_tied(get_peft_model(AutoModelForCausalLM.from_pretrained(untied), config))
    tied = get_peft_model(AutoModelForCausalLM.from_pretrained(dense), config)
    if fits_tied:
        check_tied(tied)
    else:
        with pytest.raises(
            ConfigError, match="Remove 'embed_tokens' and 'lm_head' from target_modules and modules_to_save"
        ):
            check_tied(tied)


def test_an_adapter_that_was_loaded_to_be_read_is_named_at_the_start_and_in_the_report(
    run: Run, dense: Path, tmp_path: Path
) -> None:
    run(scenarios.loaded_to_be_read, model=dense, out=tmp_path).expect()
