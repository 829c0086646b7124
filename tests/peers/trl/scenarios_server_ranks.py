"""Runs of the real TRL on two ranks with one `vllm serve`, begun as those of `scenarios_ranks`, and with the same ending."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import TrainerCallback

from mismatch_ext.errors import EngineError
from tests.oracle import expect_float32, watch_float32_error
from tests.peers.trl.scenarios_ranks import R3, both, build, expect_unions, listen, main, outcome, series
from tests.peers.trl.scenarios_training import forwards


def train(model: str, out: str, url: str) -> None:
    """Train with a server for both ranks; then let somebody else name its weights after the first step of another run."""
    block = {"precision": {"dtype": "float32"}, "routing": R3, "correction": {"preset": "token_truncate"}}
    server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 60.0}
    trainer = build(model, f"{out}/trained", block, bf16=None, **server)
    heard, errors = listen(trainer), watch_float32_error(trainer)
    found = outcome(trainer)
    # One client, and what it learns is known to both.
    assert hasattr(trainer.vllm_generation, "vllm_client") == trainer.accelerator.is_main_process
    assert trainer.mm.verdict.status == "in_sync" and "tensors are equal bit by bit" in trainer.mm.verdict.message
    assert trainer.mm.checked.weight_version == 3
    expect_float32(found["logged"], sum(both(errors), []))
    # The old-logprob pass and the update, in each of three steps.
    assert forwards(trainer) == 6
    assert series(found, "mismatch/routing/set_mismatch_frac") == [0.0] * 3
    expect_unions(found, heard)

    overtaken = build(model, f"{out}/overtaken", block, bf16=None, **server)

    class Overtakes(TrainerCallback):
        """Names the server's weights as another trainer would have."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if overtaken.accelerator.is_main_process:
                overtaken.vllm_generation.vllm_client.remote.weight_version = "mismatch/elsewhere:1:0/7"

    overtaken.add_callback(Overtakes())
    # A failure that the main process alone can see ends both, and neither has stepped on.
    with pytest.raises(EngineError, match="another trainer, elsewhere:1:0"):
        overtaken.train()
    assert overtaken.state.global_step == 1


if __name__ == "__main__":
    main(globals())
