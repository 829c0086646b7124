"""Runs of the real TRL on two ranks with one `vllm serve`, begun as those of `scenarios_ranks`, and with the same ending."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from mismatch_ext.errors import EngineError
from tests.oracle import watch_float32_error
from tests.peers.trl.scenarios_ranks import R3, build, listen, main, outcome


def train(model: str, out: str, url: str) -> dict[str, Any]:
    """Train with a server for both ranks; then let somebody else name its weights after the first step of another run."""
    block = {"precision": {"dtype": "float32"}, "routing": R3, "correction": {"preset": "token_truncate"}}
    server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 60.0}
    trainer = build(model, f"{out}/trained", block, bf16=None, **server)
    heard, errors, verdicts = listen(trainer), watch_float32_error(trainer), []
    verify = trainer.mm.checked.verifier.verify

    def noted(*args: Any, **kwargs: Any) -> Any:
        verdicts.append(verify(*args, **kwargs))
        return verdicts[-1]

    trainer.mm.checked.verifier.verify = noted
    result = outcome(trainer, heard=heard, float32_errors=errors)
    found = {
        "verdicts": [[verdict.status, verdict.gap_mean, verdict.message] for verdict in verdicts],
        "weight_version": trainer.mm.checked.weight_version,
        "client": hasattr(trainer.vllm_generation, "vllm_client"),
    }
    overtaken = build(model, f"{out}/overtaken", block, bf16=None, **server)

    class Overtakes(TrainerCallback):
        """Names the server's weights as another trainer would have."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if overtaken.accelerator.is_main_process:
                overtaken.vllm_generation.vllm_client.remote.weight_version = "mismatch/elsewhere:1:0/7"

    overtaken.add_callback(Overtakes())
    try:
        overtaken.train()
    except EngineError as error:
        found["overtaken"] = str(error)
    return {**result, **found, "steps of the overtaken": overtaken.state.global_step}


if __name__ == "__main__":
    main(globals())
