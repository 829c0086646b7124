"""Small failures in verl's workers and driver: a rank's pass, a NaN, a request's settings, a batch of bad rows."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from mismatch_ext.adapters.verl import behavior
from mismatch_ext.adapters.verl.driver import batch_checks
from mismatch_ext.adapters.verl.driver.trainer import MismatchTrainer
from mismatch_ext.adapters.verl.evidence import StoredBatch
from mismatch_ext.adapters.verl.loss import BASELINE, make_loss
from mismatch_ext.adapters.verl.measure import MASK, OLD, ROLLOUT
from mismatch_ext.adapters.verl.rollout.client import SETTINGS, Conversation

from docs.upstream import verl_saved_weights
from mismatch_ext.checks import Checks
from mismatch_ext.rollout import SamplingSettings
from tests.peers.forks import on_ranks
from tests.peers.verl.in_process.losses import actor_config, block_of
from tests.peers.verl.in_process.routes import nested, refused
from tests.peers.verl.in_process.workers import R2, batch, worker

SHORT = timedelta(seconds=20)


def failing_pass(model: str) -> dict[str, Any]:
    """Run out of memory on rank 0 while rank 1 waits for it in a collective, both inside the batch's context."""
    replay = worker(model, {"routing": R2}).engine.replay
    dist.barrier()
    # Nobody waits for longer in what this package calls.
    dist.distributed_c10d._set_pg_timeout(SHORT, dist.group.WORLD)
    rank = dist.get_rank()
    shared, said = torch.ones(1000), "nothing"
    try:
        with replay.batch(batch(range(4)), rank=rank, forward_only=True, reference=False):
            if rank == 0:
                raise RuntimeError("out of memory")
            # The host's own collective: it must meet the host's on the other rank, and nothing of this package's.
            dist.all_reduce(shared)
            replay._prepared = 4
            raise RuntimeError("the other rank's pass failed")
    except RuntimeError as error:
        said = str(error)
    if rank == 0:
        dist.all_reduce(shared)  # so that rank 1 goes on
    return {"said": said, "shared": float(shared.sum())}


def failing_pass_on_two(model: str) -> list[dict[str, Any]]:
    """Run `failing_pass` on two ranks."""
    return on_ranks(failing_pass, 2, model=model)


def losses_of_a_nan() -> dict[str, Any]:
    """Compute the loss of made-up rows, sound and with a NaN at one token, with sections that read the log-probabilities."""
    found: dict[str, Any] = {}
    for name, sections in {"kl": {"kl": {"coef": 0.001}}, "opsm": {"correction": {"preset": "opsm"}}}.items():
        loss = make_loss(actor_config(), block_of(**sections))
        for case in ("sound", "nan"):
            count = sum(behavior.RESPONSES)
            policy = torch.linspace(-2.0, -1.0, count, requires_grad=True)
            given = policy if case == "sound" else torch.where(torch.arange(count) == 3, torch.nan, policy)
            output, data = behavior._made_up(given, policy.detach() - 0.1, torch.ones(count), {})
            data["loss_mask"] = data["response_mask"].clone()
            data[BASELINE] = data["old_log_probs"] * 0
            value, metrics = loss(output, data)
            value.backward()
            assert policy.grad is not None
            found[f"{name} {case}"] = {
                "finite": bool(value.isfinite()),
                "slopes": bool(policy.grad.isfinite().all()),
                "metrics": sorted(metrics),
            }
    return found


def saved_weights() -> float:
    """Return what the workaround of docs/upstream/verl_saved_weights.py does."""
    return verl_saved_weights.with_workaround() - verl_saved_weights.EXPECTED


def settings_of_requests() -> list[str]:
    """Check requests with settings that the trainer does not take into account; `{}` gets the server's penalty of 1.1."""
    found = []
    expected = SamplingSettings(temperature=1.0, top_p=1.0, top_k=-1)
    neutral = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0}
    cases: list[dict[str, float]] = [
        neutral,
        *({**neutral, name: 0.1} for name in neutral),
        {"presence_penalty": -0.5},
        {},
    ]
    for given in cases:
        conversation = Conversation()
        conversation.note_settings(given)
        rows = [("key", {SETTINGS: conversation.settings})]
        with mock.patch.object(batch_checks, "extra_fields", return_value=iter(rows)):
            found.append(refused(batch_checks.check_settings, None, 1, expected, 1.0 if given else 1.1))
    return found


def sizes_of_rows() -> dict[str, Any]:
    """Compare the gaps of random rows, read as arrays, with the same of lists."""
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 7, 3, 5]
    fields = {name: [torch.randn(n, generator=generator) for n in lengths] for name in (ROLLOUT, OLD)}
    masks = [torch.rand(n, generator=generator) < 0.6 for n in lengths]
    masks[0][:], masks[1][2] = False, True
    fields[ROLLOUT][1][2] = torch.nan
    data = {name: nested(rows) for name, rows in (fields | {MASK: masks}).items()}
    stored = object.__new__(StoredBatch)
    stored._keys = [str(row) for row in range(len(lengths))]
    with mock.patch.object(StoredBatch, "_fetched", return_value=data):
        gaps, tokens = stored.sizes()
    wanted = []
    for row, mask in enumerate(masks):
        pairs = zip(mask.tolist(), fields[ROLLOUT][row].tolist(), fields[OLD][row].tolist(), strict=True)
        apart = [abs(engine - trainer) for sampled, engine, trainer in pairs if sampled]
        wanted.append(sum(apart) / len(apart) if apart else 0.0)
    return {
        "equal": bool(torch.allclose(gaps, torch.tensor(wanted, dtype=gaps.dtype), equal_nan=True)),
        "tokens": tokens.tolist() == [int(mask.sum()) for mask in masks],
    }


def led_rates() -> list[int]:
    """Return how often each local update of two steps leads the rate; the first one has bad rows only."""
    told: list[int] = []

    class Workers:
        def mismatch_update_lr(self, **statistics: float) -> list[dict[str, float]]:
            told[-1] += 1
            return [{}]

        def mismatch_metrics(self) -> list[dict[str, float]]:
            return [{}]

    class Host:
        __module__ = "verl.stand_in"

        def _update_actor(self, given: Any, metrics: dict[str, Any]) -> Any:
            return given

    driver: Any = object.__new__(type("Trainer", (MismatchTrainer, Host), {}))
    driver._block = block_of(lr={"period": 2})
    driver._kl, driver._checks = None, Checks(True)
    driver.actor_rollout_wg, driver.parameter_sync_step = Workers(), 3
    driver._statistics = lambda trigger: {"mean_length": 1.0}
    for update, trains in enumerate([False, True, True, True, True, True]):
        rows = SimpleNamespace(size=1)
        driver._bad = type("Bad", (), {"rows": rows, "__len__": lambda self, trains=trains: int(not trains)})()
        driver.local_trigger_step = update % 3
        told.append(0)
        driver._update_actor(SimpleNamespace(extra_info={}), {})
    return told
