"""Models that mix experts and see images: the text model's routes are recorded and replayed, those of image tokens too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from mismatch_ext.adapters.transformers.routing import moe_layout, record_routing, replay_routing

from mismatch_ext.errors import ReplayError, RoutingError
from tests.oracles.routing.images import batch, image_rows, whole_model
from tests.oracles.routing.passes import another, backward, watched
from tests.oracles.routing.tiny import families


def test_routes_of_image_tokens_are_recorded_and_replayed() -> None:
    model, inputs = whole_model(), batch()
    rows = image_rows(inputs)
    layout = moe_layout(model)
    # Of four layers; the vision tower's own are none of them.
    assert layout.layers == (0, 2, 3) and layout.decoder is model.get_submodule("model.language_model")

    def run(**changes: Any) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(**inputs | changes, use_cache=False).logits
        return logits.flatten(0, 1)

    plain = run()
    with record_routing(model) as recording:
        recorded = run()
    own = recording.trace
    assert torch.equal(recorded, plain) and own.experts.shape == (28, len(layout.layers), 2)
    with record_routing(model) as recording:
        run(pixel_values=-inputs["pixel_values"])
    # What the image shows decides where its tokens go, so that its routes are no function of token ids.
    assert float((recording.trace.experts != own.experts)[rows].any(-1).any(-1).float().mean()) > 0.5
    with replay_routing(model, own, others="replay"):
        assert float((run() - plain).abs().max()) <= 1e-5
    other = another(own)
    with watched(layout) as seen, replay_routing(model, other, others="replay"):
        logits = model(**inputs, use_cache=False).logits.flatten(0, 1)
    # Every position counts, so that every expert that ran gets a gradient.
    assert seen.ran(other, backward(model, logits.log_softmax(-1)[:, 1].mean()))


def test_a_pass_with_images_proves_nothing_by_its_token_ids() -> None:
    model, inputs = whole_model(), batch()
    with torch.no_grad(), record_routing(model) as recording:
        model(**inputs, use_cache=False)
    trace = recording.trace
    with (
        pytest.raises(RoutingError, match="does not know which tokens its routes are of"),
        replay_routing(model, trace),
    ):
        model(**inputs, use_cache=False)
    with torch.no_grad(), record_routing(model) as recording:
        model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False)
    # The same ids without the image are another sequence, and its routes are not those of this pass.
    with (
        pytest.raises(ReplayError, match=r"inputs beside its token ids \(pixel_values"),
        replay_routing(model, recording.trace),
    ):
        model(**inputs, use_cache=False)


def test_a_family_whose_images_have_experts_of_their_own_is_refused() -> None:
    family = next(family for family in families() if family.name == "ernie4_5_vl_moe_text")
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "patch_size": 4}
    config = transformers.Ernie4_5_VLMoeConfig(text_config=family.sized().to_dict(), vision_config=vision)
    with pytest.raises(ReplayError, match="several routers .*text_moe and .*vision_moe"):
        moe_layout(transformers.Ernie4_5_VLMoeForConditionalGeneration(config))
