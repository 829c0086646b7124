"""Runs of TRL with a `vllm serve` in which trainer or server are killed, by SIGKILL, and which go on from where they stood."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mismatch_ext.adapters.trl import MismatchGRPOTrainer

from mismatch_ext.errors import EngineError
from tests.peers.death import Death
from tests.peers.engines.vllm_server import processes
from tests.peers.trl import scenarios_kills as kills

LATER = 0.05
"""Seconds after which a server that was asked to sample has the request, and an engine that answers may be sampling."""


def block() -> dict[str, Any]:
    """Return a block in which every section that has a state has one that moves in each step."""
    found = kills.block("R3")
    return {**found, "precision": {"dtype": "float32"}}


def leg(
    model: str,
    out: str,
    url: str,
    steps: int,
    kill: dict[str, Any] | None = None,
    resume: bool = False,
    **rest: Any,
) -> dict[str, Any]:
    """Train to the end, or die on the way, or be left by the server.

    The server's tokens are those of a seed, and what is learned depends on them alone, not on how the server's batches round.

    Args:
        model: The checkpoint to begin with.
        out: The output folder, the same for all legs of a run.
        url: The server's.
        steps: Optimizer steps of the whole run.
        kill: What dies (`who`: trainer or server), when (`where`, `count`), and which part of a write is done by then (`part`).
        resume: Whether to go on, by `resume_from_checkpoint=True`.
        **rest: Trainer arguments.
    """
    if resume:
        kills.delete_torn(Path(out))
    armed = kills.Armed(resume)
    trainer = kills.trainer_of(
        model, out, block(), armed, steps, use_vllm=True, vllm_mode="server", vllm_server_base_url=url,
        vllm_server_timeout=30.0, generation_kwargs={"seed": 1}, vllm_importance_sampling_correction=False,
        log_completions=True, **rest,
    )  # fmt: skip
    if kill is not None:
        plant(trainer, armed, url, **kill)
    try:
        trainer.train(resume_from_checkpoint=resume or None)
    except EngineError as error:
        return {"error": str(error), "step": trainer.state.global_step}
    return kills.state_of(trainer)


def plant(
    trainer: MismatchGRPOTrainer, armed: kills.Armed, url: str, who: str, where: str, count: int, part: float = 0.5
) -> None:
    """Let trainer or server die at a moment."""
    death = Death(count, part, lambda: armed.on)
    leader, *engine = processes(url)
    die: Callable[[], Any] = death.die if who == "trainer" else lambda: os.killpg(leader, signal.SIGKILL)
    http: Any = trainer.vllm_generation.vllm_client.http
    if where == "generation":
        generate = http.generate

        def generate_and_die(path: str, body: Any) -> Any:
            if not death.due():
                return generate(path, body)
            # A fast engine answers before `LATER`: the trainer dies as it does, a server's engine is held until it is killed.
            for process in engine if who == "server" else ():
                os.kill(process, signal.SIGSTOP)
            threading.Timer(LATER, die).start()
            found = generate(path, body)
            if who == "trainer":
                die()
            return found

        http.generate = generate_and_die
    elif where == "update":
        post = http.post

        def post_and_die(path: str, *args: Any, **kwargs: Any) -> Any:
            if path == "/start_weight_update" and death.due():
                die()
            return post(path, *args, **kwargs)

        http.post = post_and_die
    else:
        kills.plant(trainer, armed, where, count, part)
