"""TRL's AsyncGRPOTrainer with the `mismatch:` block: weight versions, gap, correction and proof of weight updates.

The server samples while the trainer trains, so that most tokens are of older weights than those that learn from them. This file
follows a rollout: its requests pass a `Gate`, each token gets the version of its weights (`VersionedLoop`), the collator puts the
versions beside TRL's tensors, and the loss tells drift from numerics and corrects (`AsyncRun`). A weight update closes the gate,
is named, sent and verified, and opens the gate again (`CheckedTransfer`). Without a block every number is stock.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from copy import copy
from dataclasses import asdict, dataclass
from multiprocessing.context import get_spawning_popen
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import requests
import torch
from mismatch_ext.adapters import vllm as engine
from mismatch_ext.adapters.transformers.vocabulary import plain_vocabulary
from mismatch_ext.adapters.trl.config import MismatchConfigMixin, sampling_settings
from mismatch_ext.adapters.trl.host import MeasuredTrainer, TrainerRun
from mismatch_ext.adapters.trl.refusals import Row, check_peers, refuse
from mismatch_ext.adapters.trl.seams import REFUSALS
from mismatch_ext.adapters.vllm.http import COMPLETIONS, ServerHttp
from mismatch_ext.adapters.vllm.remote import RemoteEngine
from mismatch_ext.adapters.vllm.server.plugin import BACKEND
from mismatch_ext.adapters.vllm.server_checks import ServerCheck, unchecked
from mismatch_ext.adapters.vllm.stamps import Stamps, is_fresh
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mismatch_ext import errors
from mismatch_ext.config import MismatchConfig
from mismatch_ext.correction import correct, metrics_over_ranks
from mismatch_ext.drift import ENOUGH, UNKNOWN, drift_sums
from mismatch_ext.errors import ConfigError, EngineError, MismatchError, RecordError, SeamError, WeightSyncError
from mismatch_ext.names import PREFIX
from mismatch_ext.precision.readiness import EVENT as READINESS
from mismatch_ext.presets import ResolvedCorrection, resolve
from mismatch_ext.ranks import ONE_PROCESS, Ranks
from mismatch_ext.rng import forked_rng
from mismatch_ext.seams import named
from mismatch_ext.versions import installed
from mismatch_ext.weights import WeightVerifier

try:
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
    from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout
    from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, RolloutGroup, _AsyncRolloutLoop
    from trl.experimental.async_grpo.packing import TreeRow
    from trl.experimental.async_grpo.weight_transfer import WeightTransferClient
except ImportError as error:
    raise SeamError(
        f"AsyncGRPO of trl {installed('trl')} with a mismatch block: its rollout loop, packed rows, weight transfer and loss are "
        f"not where TRL 1.16 has them ({error}). TRL 1.18 has moved them to trl.trainer.async_grpo_trainer and "
        "trl.generation.async_vllm_client, where nobody has run a block. Install trl==1.16.0, or use MismatchGRPOTrainer."
    ) from error

CUT = "abort"
"""vLLM's finish reason of a request that its pause has ended."""
CUTS = "mismatch/responses_cut_total"
"""Metric that counts answers which a weight update has cut."""
POLL, PAUSE = 0.02, 0.1
"""Seconds between looks at a closed gate, and between pauses while requests are under way."""
FRESH_LENGTH = 32
"""Most tokens of an answer that is sampled to measure numerics: the longer the answers, the longer rollouts wait."""
VERSIONS, INDEX, OLD, ADVANTAGES, SEGMENTS = (
    "mismatch_versions", "token_index", "old_log_probs", "advantages", "segment_id",
)  # fmt: skip
"""Keys of a micro-batch: ours, and those of TRL that a correction reads or changes."""

ABSENT = (
    *(
        Row(
            refusal.feature, f"{named([refusal.feature])} with AsyncGRPO", lambda s, b: True, refusal.why,
            f"allowed: {refusal.instead}. Change or remove it",
        )
        for refusal in REFUSALS
        if "AsyncGRPOTrainer" in refusal.where
    ),
    Row(
        "correction", "mismatch.correction.normalize=True with AsyncGRPO", lambda s, b: resolve(b.correction).normalize,
        "weights would be divided by the mean of a micro-batch, whose size depends on the lengths of its rollouts",
        "set it to False",
    ),
)  # fmt: skip


@dataclass
class MismatchAsyncGRPOConfig(MismatchConfigMixin, AsyncGRPOConfig):  # type: ignore[misc]  # fields of GRPO's own
    """TRL's `AsyncGRPOConfig` plus `mismatch`, of which it takes precision, correction and monitor."""

    _VALID_DICT_FIELDS = [*AsyncGRPOConfig._VALID_DICT_FIELDS, "mismatch"]

    def __post_init__(self) -> None:
        block = self.mismatch_block()
        if block is not None and block.level == "observe":
            raise ConfigError(
                "mismatch.level='observe' with AsyncGRPO: which weights have sampled a token is known because requests end where "
                "weights are updated, and that is another run than without it; allowed: enforce."
            )
        super().__post_init__()

    def _follow_objective(self, block: MismatchConfig) -> None:
        refuse(ABSENT, self, block)

    def _check_settled(self, block: MismatchConfig) -> None:
        """Refuse nothing: GRPO's settings are not this trainer's."""


# Each request, and so each token, is of one weight version.


class Held(NamedTuple):
    """The weights that answer a request: finished optimizer steps when they were sent, and the number of their update."""

    step: int
    update: int


class Gate:
    """A gate that the trainer shares with the process of its rollout worker, as shared memory: open, step, update, requests."""

    # A request enters before it is sent and leaves when it is answered. The trainer closes the gate, waits until no request is
    # inside, and opens it when the new weights are there. So no request sees two versions, whatever the server does meanwhile.

    def __init__(self, context: Any) -> None:
        self._state = context.Array("q", 4)

    def __getstate__(self) -> dict[str, Any]:
        # TRL pickles a worker's arguments once to see whether it can; shared memory can be pickled only to spawn a process.
        return {} if get_spawning_popen() is None else self.__dict__.copy()

    def begin(self) -> None:
        """Forget the requests of a worker that has ended, and let none through until weights are there."""
        with self._state.get_lock():
            self._state[:] = [0, *self._state[1:3], 0]

    def close(self) -> None:
        """Let no further request through."""
        with self._state.get_lock():
            self._state[0] = 0

    def open(self, held: Held) -> None:
        """Let requests through to new weights."""
        with self._state.get_lock():
            self._state[:3] = [1, *held]

    @property
    def requests(self) -> int:
        """How many requests are inside."""
        with self._state.get_lock():
            return int(self._state[3])

    def enter(self) -> Held | None:
        """Let a request through, and return the weights that it will find; None while the gate is closed."""
        with self._state.get_lock():
            if not self._state[0]:
                return None
            self._state[3] += 1
            return Held(*self._state[1:3])

    def leave(self) -> None:
        """Note that a request which was let through has been answered, or has failed."""
        with self._state.get_lock():
            self._state[3] -= 1


class Sampled(float):
    """A log-probability that knows which weights sampled its token, also when TRL has made, forked and masked its row."""

    __slots__ = ("step",)
    step: int

    @classmethod
    def of(cls, values: Sequence[float], step: int) -> list[Sampled]:
        """Return the log-probabilities of one request."""
        known = [cls(value) for value in values]
        for value in known:
            value.step = step
        return known


class Carried(dict[str, float]):
    """A rollout's metrics, which TRL hands on by reference to its collator, with the version of each of its tokens `[S]`."""

    versions: NDArray[np.int64]

    @classmethod
    def along(cls, metrics: Mapping[str, float], logprobs: Sequence[float]) -> Carried:
        """Return metrics with what log-probabilities know; a plain float is a token that the policy did not sample."""
        carried = cls(metrics)
        carried.versions = np.array([getattr(value, "step", UNKNOWN) for value in logprobs], dtype=np.int64)
        return carried


class VersionedLoop(_AsyncRolloutLoop):
    """TRL's rollout loop, in the process that TRL spawns for it, with log-probabilities that know their weights' version."""

    # vLLM's pause ends the running requests with the tokens that they have so far. When the new weights are there, each goes on
    # as a new request whose prompt includes those tokens.

    def __init__(self, *, gate: Gate, owner: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._gate, self._owner = gate, owner

    async def _post(self, path: str, payload: dict[str, Any], timeout: float, max_retries: int = 3) -> Any:
        """Ask as TRL does, and continue an answer that an update has cut until it is complete."""
        if path != COMPLETIONS:
            return await super()._post(path, payload, timeout, max_retries)
        # For a setting that it is not sent, the server takes the model's own default, which the trainer does not score with.
        settings = {"min_p": 0.0, **payload}
        ids: list[int] = []
        logprobs: list[Sampled] = []
        while True:
            rest = {"prompt": [*payload["prompt"], *ids], "max_tokens": payload["max_tokens"] - len(ids)}
            async with self._through() as held:
                answer = await super()._post(path, settings | rest, timeout, max_retries)
                await self._expect(held)
            choice = answer["choices"][0]
            sampled = choice["token_ids"] or []
            ids += sampled
            logprobs += Sampled.of((choice["logprobs"] or {}).get("token_logprobs") or [], held.step)
            if choice["finish_reason"] != CUT:
                break
            self._counters[CUTS] += bool(sampled)
            # The same seed would repeat, for the next tokens, the draws of the first tokens.
            settings["seed"] = random.getrandbits(63)
        whole = {**choice, "token_ids": ids, "logprobs": {**(choice["logprobs"] or {}), "token_logprobs": logprobs}}
        return {**answer, "choices": [whole]}

    @asynccontextmanager
    async def _through(self) -> AsyncIterator[Held]:
        """Wait until the gate is open, and be inside."""
        while (held := self._gate.enter()) is None:
            await asyncio.sleep(POLL)
        try:
            yield held
        finally:
            self._gate.leave()

    async def _expect(self, held: Held) -> None:
        """Refuse an answer by other weights than those that the trainer sent last."""
        session: Any = self.session
        limit = aiohttp.ClientTimeout(total=self.request_timeout)
        async with session.get(f"{self.vllm_server_url}/weight_info", timeout=limit) as response:
            response.raise_for_status()
            version = (await response.json())["weight_version"]
        if version != f"{self._owner}{held.update}":
            raise EngineError(
                f"the vLLM server at {self.vllm_server_url} does not hold this trainer's weights: it calls them {version!r}, and "
                f"they were sent as '{self._owner}{held.update}'. It was restarted, or another trainer has sent weights to it; "
                "give each trainer a server of its own, and resume from the last checkpoint."
            )

    async def _score_group(self, group: RolloutGroup) -> Any:
        """Score a group as TRL does, and attach to each row the versions of its tokens."""
        samples = await super()._score_group(group)
        rows = [row for conversation in group.completions_sequences for row in conversation]
        for sample, row in zip(samples, rows, strict=True):
            sample.metrics = Carried.along(sample.metrics, row.old_log_probs)
        return samples


# What is known of a micro-batch's tokens.


class CarryingCollator:
    """TRL's collator, which also puts the versions of trained tokens in the batch, in the order of TRL's `token_index`."""

    def __init__(self, inner: Callable[[Any], dict[str, Any]]) -> None:
        self.inner = inner
        self.prompts: list[tuple[int, ...]] = []  # of the last micro-batch

    def __call__(self, examples: Any) -> dict[str, Any]:
        """Return the batch of a list that holds one micro-batch, which is a list of rows."""
        batch = self.inner(examples)
        (rows,) = examples
        firsts = [
            (sample["input_ids"], int(np.argmax(sample["completion_mask"]))) for row in rows for sample in row.samples
        ]
        self.prompts = list(dict.fromkeys(tuple(ids[:first].tolist()) for ids, first in firsts))
        batch[VERSIONS] = pad_sequence([versions_of(row) for row in rows], batch_first=True, padding_value=UNKNOWN)
        return batch


def versions_of(row: Any) -> Tensor:
    """Return the versions `[M]` of a packed row's trained tokens."""
    parts = []
    for sample in row.samples:
        carried = sample["metrics"]
        if not isinstance(carried, Carried) or len(carried.versions) != len(sample["input_ids"]):
            raise RecordError(
                "a rollout came without the versions of its tokens: something between the rollout worker and the collator has "
                "replaced its metrics or its tokens. Hand both on as they are."
            )
        trained = np.asarray(sample["completion_mask"], dtype=bool).copy()
        trained[0] = False  # nothing predicts the first token
        parts.append(carried.versions[trained])
    return torch.from_numpy(np.concatenate(parts))


class Terms(NamedTuple):
    """The trained tokens of this rank's row, a line for each rollout `[B, T]`; log-probabilities have no graph."""

    logprobs: Tensor
    rollout: Tensor
    mask: Tensor
    versions: Tensor
    advantages: Tensor

    @classmethod
    def of(cls, logprobs: Tensor, inputs: Mapping[str, Any]) -> Terms:
        """Lay out in lines what TRL has in one sequence, with the trainer's log-probabilities at each of its positions `[N]`."""
        chosen = inputs[INDEX] >= 0
        sizes = torch.bincount(inputs[SEGMENTS][chosen]).tolist()
        flat = logprobs.detach().float()[inputs[INDEX][chosen]]
        trained = (inputs[key][chosen] for key in (VERSIONS, ADVANTAGES))
        parts = (flat, inputs[OLD][chosen], torch.ones_like(flat, dtype=torch.bool), *trained)
        return cls(*(pad_sequence(list(part.split(sizes)), batch_first=True) for part in parts))


def corrected(
    terms: Terms, inputs: Mapping[str, Any], settings: ResolvedCorrection
) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the micro-batch with weighted advantages, and metrics; each token's term in TRL's loss scales with its advantage.

    `decoupled`: the old policy is the policy in this pass, because no optimizer step lies between the two. TRL's own ratio is
    then 1, with its gradient, and the importance weight pi_old/mu multiplies it. `bypass` with `ppo_clip`: TRL's ratio stays
    pi/mu, and rejected tokens weigh nothing. `bypass` with `reinforce`: TRL's ratio is 1, and the weight is pi/mu.
    """
    done = correct(
        old_logprobs=terms.logprobs,
        rollout_logprobs=terms.rollout,
        response_mask=terms.mask,
        config=settings,
        advantages=terms.advantages,
    )
    clips = settings.mode == "bypass" and settings.loss == "ppo_clip"
    weights = done.mask.float() if clips else done.as_multiplier()
    chosen, changed = inputs[INDEX] >= 0, dict(inputs)
    changed[ADVANTAGES] = inputs[ADVANTAGES].clone()
    changed[ADVANTAGES][chosen] *= weights[terms.mask].to(inputs[ADVANTAGES].dtype)
    if not clips:
        changed[OLD] = inputs[OLD].clone()
        changed[OLD][chosen] = terms.logprobs[terms.mask]
    return changed, done.metrics


# Weight updates.


class CheckedTransfer:
    """TRL's weight transfer, or a user's own, between a gate that holds requests back and a check of what has arrived."""

    def __init__(self, inner: Any, run: AsyncRun, gate: Gate, alive: Callable[[], None]) -> None:
        self.inner, self.run, self.remote, self.gate = inner, run, run.remote, gate
        self.stamps = Stamps()
        self._alive, self._sending = alive, engine.Sending()
        # Instead of as `inner` sends them: in the bodies of requests, for a server without NCCL.
        self._over_http = self.remote.backend == BACKEND and isinstance(inner, WeightTransferClient)

    def init_weight_transfer(self) -> None:
        """Agree with the server on how weights travel, and look at what it holds now."""
        self.gate.begin()
        fresh = is_fresh(self.remote)
        if self._over_http:
            self.remote.http.post("/init_weight_transfer_engine", {"init_info": {}})
        else:
            self.inner.init_weight_transfer()
        if fresh and self.run.verifier is not None:
            self.run.verifier.begin()

    def pause(self) -> None:
        """End what the server is generating, and wait until the rollout worker has all of it."""
        self.gate.close()
        self.stamps.expect_on(self.remote)
        begun = time.monotonic()
        self.remote.http.post("/pause?mode=abort")
        while requested := self.gate.requests:
            self._alive()
            if time.monotonic() - begun > self.remote.http.timeout:
                raise EngineError(
                    f"{requested} requests of the rollout worker did not come back within {self.remote.http.timeout:g} s after "
                    f"the vLLM server at {self.remote.http.url} was paused for a weight update. Look at its log and restart it."
                )
            time.sleep(PAUSE)
            # A request that was still on its way came after the pause, and waits in the server's queue.
            self.remote.http.post("/pause?mode=abort")
        self.remote.http.reset_prefix_cache("before")
        if not self._over_http:
            self.inner.pause()

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Send weights under a name of this trainer's; if sending fails half-way, the server keeps a name that says so."""
        self.remote.weight_version = self.stamps.begin()
        self._sending = engine.Sending()
        weights = self._sending.through(iterator)
        if self._over_http:
            self.remote.http.post("/start_weight_update", {})
            self.remote.send(weights)
            self.remote.http.post("/finish_weight_update", {})
        else:
            self.inner.send_weights(weights)
        self.remote.weight_version = self.stamps.end()

    def resume(self) -> None:
        """Let the server go on, verify that it computes with the new weights, and only then let requests through."""
        if self._over_http:
            self.remote.http.post("/resume")
        else:
            self.inner.resume()
        if not self._sending.dtypes:
            raise WeightSyncError(
                f"no weights were sent to the vLLM server at {self.remote.http.url}: {type(self.inner).__name__}.send_weights "
                "has read none of those that it got. Send them all, or leave out weight_transfer."
            )
        self.run.sent(frozenset(self._sending.dtypes))
        if self.run.verifier is not None:
            self.stamps.expect_on(self.remote)
            self.run.verifier.verify(self._sending.samples)
        self.run.measure_fresh()
        self.gate.open(Held(self.run.step, self.stamps.count))

    def destroy(self) -> None:
        """End the transfer as TRL does."""
        self.inner.destroy()


class AsyncRun(TrainerRun):
    """The block's side of an AsyncGRPOTrainer, as `trainer.mm`."""

    remote: RemoteEngine
    verifier: WeightVerifier | None = None
    correction: ResolvedCorrection | None = None
    collator: CarryingCollator | None = None

    def check_sharding(self) -> None:
        """Refuse what has been run only with whole parameters."""
        trainer, proves = self.trainer, self.block.monitor.weight_sync != "off"
        if trainer.is_deepspeed_enabled or (trainer.is_fsdp_enabled and proves):
            raise ConfigError(
                "a mismatch block with AsyncGRPO and sharded parameters (FSDP or DeepSpeed): updates are verified with whole "
                "parameters alone; use DDP or MismatchGRPOTrainer, or with FSDP set mismatch.monitor.weight_sync='off'."
            )

    def check_model(self) -> None:
        self.check_precision()

    @property
    def grid_ranks(self) -> Ranks:
        """The main process alone, which alone has read the engine."""
        return ONE_PROCESS

    def begin(self, config: MismatchAsyncGRPOConfig) -> None:
        """Audit both sides, once TRL has built its parts, and come between TRL and its rollout worker and weight transfer."""
        trainer = self.trainer
        self.sampling = sampling_settings(config, None)
        self.log.sampled_with(self.sampling)
        self.log.follow_versions()
        if self.block.correction is not None:
            self.correction = resolve(self.block.correction)
        self.alarms.install(trainer)
        self.readings = {"trainer": self.read_trainer()}
        if not trainer.accelerator.is_main_process:
            return
        trainer.vllm_client.wait_for_server_ready()
        http = ServerHttp(trainer.vllm_client.server_url, requests.Session(), config.vllm_server_timeout)
        self.engine = self.remote = RemoteEngine(http)
        ServerCheck(self.block)(self.remote, trainer.accelerator.device.type)
        self.audit()
        for name, message in (("server", unchecked(self.remote)), (READINESS, self.readiness)):
            if message is not None:
                self.warn(name, message)
        with self.verdicts.checking("attention"):
            self.warn_of_attention(trainer.processing_class)
        if self.block.monitor.weight_sync != "off":
            self.verifier = self.verifier_of(
                self.remote, plain_vocabulary(trainer.processing_class, trainer.accelerator.device)
            )
        worker = trainer.rollout_worker
        if not isinstance(worker, AsyncRolloutWorker) or worker._loop_cls not in (_AsyncRolloutLoop, VersionedLoop):
            raise ConfigError(
                f"rollout_worker={type(worker).__name__} with a mismatch block: which weights have sampled a token is known of "
                "TRL's own rollout loop alone; leave it out, or remove the block."
            )
        gate, timeout = Gate(worker._mp_ctx), config.heartbeat_stale_after_s
        transfer = CheckedTransfer(trainer.weight_transfer, self, gate, lambda: worker.check_health(timeout))
        trainer.weight_transfer = transfer
        worker._loop_cls = VersionedLoop
        worker._loop_kwargs |= {"gate": gate, "owner": transfer.stamps.owner}
        vars(worker).update(check_health=naming(worker), stop=ending(worker))
        self.log.announce()

    def score(self, token_ids: Tensor) -> Tensor:
        with plain_attention(self.trainer.accelerator.unwrap_model(self.trainer.model)):
            return super().score(token_ids)

    # One micro-batch.

    def loss(self, plain: Callable[..., Any], model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Compute TRL's loss from one forward pass, whose answer is measured and corrects the inputs before the loss is made."""
        if not self.trainer.model.training:
            return plain(model, inputs, *args, **kwargs)
        begun = time.time()
        outputs = self._outputs(model, inputs)
        self.trainer._step_forward_s += time.time() - begun
        terms = Terms.of(outputs.log_probs.flatten(), inputs)
        self.log.observe("train", terms.logprobs, terms.rollout, terms.mask)
        self.log.add_drift(drift_sums(*terms[:4], scoring=self.step))
        if self.correction is not None:
            inputs, metrics = corrected(terms, inputs, self.correction)
            for name, value in metrics_over_ranks(metrics, terms.mask, self.correction, self.ranks).items():
                self.trainer._metrics["train"][PREFIX + name].append(value)
        return plain(lambda **_: outputs, inputs, *args, **kwargs)

    def _outputs(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Return what the model answers to the arguments with which TRL's loss calls it; that loss is dropped."""
        answers: list[Any] = []

        def asked(**arguments: Any) -> Any:
            answers.append(model(**arguments))
            return answers[-1]

        stand_in, accelerator = copy(self.trainer), copy(self.trainer.accelerator)
        accelerator.gather = accelerator.reduce = lambda tensor, *_, **__: tensor
        vars(stand_in).update(accelerator=accelerator, _metrics=defaultdict(lambda: defaultdict(list)))
        AsyncGRPOTrainer.compute_loss(stand_in, asked, inputs)
        return answers[0]

    def measure_fresh(self) -> None:
        """Measure numerics on a few answers of the new weights, of which an asynchronous trainer's batches have hardly any."""
        trainer, prompts = self.trainer, [] if self.collator is None else self.collator.prompts
        if not prompts or trainer.is_fsdp_enabled:  # before the first batch; and one rank alone takes this pass
            return
        length = min(FRESH_LENGTH, trainer.args.max_completion_length)
        asked = [list(map(int, prompt)) for prompt in itertools.islice(itertools.cycle(prompts), -(-ENOUGH // length))]
        body = {
            "model": self.remote.model,
            "prompt": asked,
            "max_tokens": length,
            "logprobs": 0,
            "return_token_ids": True,
        }
        answer = self.remote.http.generate(COMPLETIONS, body | asdict(self.sampling))
        row = TreeRow()
        for prompt, choice in zip(asked, answer["choices"], strict=True):
            row.add(fresh_sample(prompt, choice, self.step))
        # A collator of our own, because TRL's counts what it collates as trained on.
        inputs = CarryingCollator(DataCollatorForRollout(trainer.processing_class.pad_token_id))([[row]])
        inputs = {name: value.to(trainer.accelerator.device) for name, value in inputs.items()}
        model = trainer.accelerator.unwrap_model(trainer.model)
        with torch.no_grad(), forked_rng(trainer.accelerator.device), self.autocast():
            outputs = self._outputs(model, inputs)
        terms = Terms.of(outputs.log_probs.flatten(), inputs)
        self.log.add_drift(drift_sums(*terms[:4], scoring=self.step, buffered=True))

    # Logs.

    def further_metrics(self) -> dict[str, float]:
        verdict = None if self.verifier is None else self.verifier.verdict
        return {} if verdict is None else {"weight_sync_gap": verdict.gap_mean}

    def ratio_bias(self) -> str | None:
        return self.sampling.ratio_bias()


class MismatchAsyncGRPOTrainer(MeasuredTrainer, AsyncGRPOTrainer):
    """Drop-in `AsyncGRPOTrainer` that takes a `MismatchAsyncGRPOConfig`; without a block every method passes straight on."""

    mm: AsyncRun | None = None

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        config: Any = kwargs.get("args") or next((a for a in args if isinstance(a, MismatchAsyncGRPOConfig)), None)
        block = config.mismatch_block() if isinstance(config, MismatchAsyncGRPOConfig) else None
        if block is None:
            super().__init__(model, *args, **kwargs)
            return
        if kwargs.get("peft_config") is not None:
            raise ConfigError(
                "a mismatch block with AsyncGRPO and peft_config: what reaches the server of an adapter is not verified; train "
                "all weights, or remove the block."
            )
        self.mm = mm = AsyncRun(self, block, config.output_dir)
        mm.verdicts.at(lambda: mm.step)
        check_peers(type(self), block, use_vllm=True, server=True)
        with config.claimed():
            super().__init__(model, *args, **kwargs)
        mm.begin(config)

    def get_train_dataloader(self) -> Any:
        """Return TRL's loader, whose batches also hold the versions of their tokens."""
        loader = super().get_train_dataloader()
        if self.mm is not None:
            rows: Any = loader.base_dataloader
            rows.collate_fn = self.mm.collator = CarryingCollator(rows.collate_fn)
        return loader

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss as TRL does, from a forward pass that is measured and corrected."""
        plain = super().compute_loss
        return plain(*args, **kwargs) if self.mm is None else self.mm.loss(plain, *args, **kwargs)


@contextmanager
def plain_attention(model: Any) -> Iterator[None]:
    """Let a model use plain attention for the time of a block, because TRL's attention needs the paths of a packed tree."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def fresh_sample(prompt: Sequence[int], choice: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Return a server's answer in the form in which TRL hands rollouts to its collator."""
    sampled = choice["token_ids"]
    logprobs = [0.0] * len(prompt) + Sampled.of(choice["logprobs"]["token_logprobs"], step)
    return {
        "input_ids": np.array([*prompt, *sampled], dtype=np.int64),
        "completion_mask": np.array([0] * len(prompt) + [1] * len(sampled), dtype=np.int64),
        "old_log_probs": np.array(logprobs, dtype=np.float32),
        "advantage": 0.0,
        "group_id": 0,
        "metrics": Carried.along({}, logprobs),
    }


def naming(worker: Any) -> Callable[[float], None]:
    """Return TRL's health check of a rollout worker, changed to raise an error of this package as its own class."""
    plain = worker.check_health

    def check_health(stale_after_s: float) -> None:
        try:
            plain(stale_after_s)
        except RuntimeError as error:
            name, _, message = str(error.__cause__ or "").partition("\n")[0].partition(": ")
            kind = getattr(errors, name, None)
            if isinstance(kind, type) and issubclass(kind, MismatchError):
                raise kind(message) from error
            raise

    return check_health


def ending(worker: Any) -> Callable[[], None]:
    """Return TRL's `stop` of a rollout worker, changed to end one that has failed at once."""
    # TRL sets an event that a thread of the process waits for. `multiprocessing.Event.set` returns only when each waiting thread
    # has woken. In a process that has ended no thread wakes, so that the training would not end.
    plain = worker.stop

    def stop() -> None:
        process = worker._process
        if process is None or process._popen is None or (process.is_alive() and not worker._failed_event.is_set()):
            plain()
            return
        process.kill()
        process.join()
        worker._process = None

    return stop
