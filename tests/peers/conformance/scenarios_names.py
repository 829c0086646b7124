"""What verl's driver and TRL's trainer log of KL and correction, without an engine.

What imports a host is imported by its scenario: the other one does not need it.
"""

from __future__ import annotations

from typing import Any

KL = {"estimator": "k1", "coef": 0.1, "target_kl": 1e-3}


def kl_in_trl(model: str, out: str) -> dict[str, Any]:
    """Train two steps with an adaptive coefficient."""
    from tests.peers.trl.scenarios_kl import build, moved

    trainer = build(model, out, {"kl": KL}, max_steps=2)
    moved(trainer)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {"steps": [_of_kl(step) for step in steps], "own": steps[0]["kl"]}


def kl_in_verl() -> dict[str, Any]:
    """Measure two batches with an adaptive coefficient, as the driver does between old log-probabilities and advantages."""
    from mismatch_ext.config import MismatchConfig
    from tests.peers.verl.in_process.scenarios_driver import adapted, driving, proto

    block = MismatchConfig.parse({"kl": KL})
    assert block is not None
    with driving(kl=block.kl) as (driver, _):
        steps = [{f"mismatch/{k}": v for k, v in adapted(proto(), driver.term).items()} for _ in range(2)]
        return {"steps": [_of_kl(step) for step in steps]}


def _of_kl(step: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in step.items() if "kl_ref" in name or "kl_coef" in name}
