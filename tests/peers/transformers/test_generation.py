"""Routes that are recorded while transformers generates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from mismatch_ext.adapters.transformers.routing import record_generation, record_routing, replay_routing
from peft import LoraConfig, get_peft_model
from torch import Tensor

from mismatch_ext.errors import ReplayError
from mismatch_ext.routing import RoutingTrace, align
from tests.peers.transformers.cases import FAMILIES, QWEN


def generate(model: Any, **settings: Any) -> tuple[Tensor, Tensor]:
    """Sample from prompts of which two are padded; return them and the mask of their real tokens."""
    ids = torch.randint(3, 96, (3, 6), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    for row, padding in ((0, 3), (2, 1)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    torch.manual_seed(1)
    settings = {"do_sample": True, "max_new_tokens": 8, "pad_token_id": 0, "suppress_tokens": [0], **settings}
    return model.generate(ids, attention_mask=mask, **settings), mask


def check_generated(model: Any, output: Tensor, traces: list[RoutingTrace], ends: set[int]) -> list[int]:
    """Compare each trace with the routing of its sequence in a forward by itself, cut after the end by hand."""
    assert len(traces) == len(output)
    rows = []
    for sequence, trace in zip(output.tolist(), traces, strict=True):
        prompt, response = [t for t in sequence[:6] if t != 0], sequence[6:]
        stop = next((place for place, token in enumerate(response) if token in ends), len(response) - 1)
        real = prompt + response[: stop + 1]
        with torch.no_grad(), record_routing(model) as recording:
            model(input_ids=torch.tensor([real]), use_cache=False)
        assert trace.start == 0 and torch.equal(trace.experts, recording.trace.experts[:-1])
        rows.append(trace.rows)
    return rows


@pytest.mark.parametrize("name", [QWEN, "deepseek_v3", "gpt_oss", "llama4_text", "qwen3_next"])
def test_generation(name: str) -> None:
    model = FAMILIES[name].build().eval()
    ends = set(range(3, 20))
    with record_generation(model, version=7) as recording:
        output, _ = generate(model, num_return_sequences=2, eos_token_id=sorted(ends))
        assert len(recording.traces) == 6  # there while the context lasts, as a training loop wants them
    rows = check_generated(model, output, recording.traces, ends)
    assert len(set(rows)) > 2  # sequences that ended early, and prompts of different lengths
    assert all(trace.versions == ((0, 7),) for trace in recording.traces)


def test_generation_without_an_end_token_and_greedy_and_again() -> None:
    model = FAMILIES[QWEN].build().eval()
    model.generation_config.eos_token_id = None
    with record_generation(model) as recording:
        one, _ = generate(model, do_sample=False)
        two, _ = generate(model, return_dict_in_generate=False)
    rows = check_generated(model, torch.cat([one, two]), recording.traces, set())
    assert rows == [3 + 7, 6 + 7, 5 + 7] * 2


def test_generation_through_peft() -> None:
    model: Any = get_peft_model(FAMILIES[QWEN].build(), LoraConfig(target_modules=["q_proj"])).eval()
    with record_generation(model) as recording:
        output, _ = generate(model, eos_token_id=2)
    check_generated(model, output, recording.traces, {2})


def test_generated_traces_are_replayed() -> None:
    model = FAMILIES[QWEN].build()
    with record_generation(model.eval()) as recording:
        output, mask = generate(model, eos_token_id=list(range(3, 20)))
    real = torch.zeros_like(output)
    for row, trace in enumerate(recording.traces):
        first = int((mask[row] == 0).sum())
        real[row, first : first + trace.rows + 1] = 1
    trace, recorded = align(recording.traces, real)
    assert int(recorded.sum()) == sum(t.rows for t in recording.traces)
    with replay_routing(model.train(), trace, recorded, native=True) as replay:
        model(input_ids=output, attention_mask=real, use_cache=False).logits.sum().backward()
    assert torch.equal(replay.native.experts[recorded], trace.experts[recorded])


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"num_beams": 2, "do_sample": False}, "num_beams=2 cannot be recorded"),
        ({"use_cache": False}, "ran 3 x .* through the routers, not 3 x"),
        ({"prompt_lookup_num_tokens": 2, "do_sample": False}, "prompt_lookup_num_tokens=2"),
        ({"assistant_model": "any"}, "assisted"),
    ],
    ids=["beams", "no cache", "lookup", "assistant"],
)
def test_generation_whose_tokens_are_not_routed_one_by_one_is_refused(settings: dict[str, Any], message: str) -> None:
    model = FAMILIES[QWEN].build().eval()
    with pytest.raises(ReplayError, match=message), record_generation(model):
        generate(model, **settings)


def test_a_model_that_cannot_generate_is_refused() -> None:
    model = FAMILIES["qwen3_vl_moe_text"].build()
    with pytest.raises(ReplayError, match=r"has no generate\(\)"), record_generation(model):
        pass
