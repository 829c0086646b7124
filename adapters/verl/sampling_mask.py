"""Sampling masks in verl, in the order of a rollout: vLLM's server, agent loops, the driver's check, the FSDP engine's passes.

verl asks vLLM for the sampled token's log-probability alone. Here vLLM also returns its most likely tokens: those that it has cut
off have -inf, and the ids of the others go with the answer. Only runs with `mismatch.sampling_mask` import this module.

Shapes: T tokens of a sample, N tokens of a micro-batch, R rows of logits of a pass on this rank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import ray
import torch
from mismatch_ext.adapters.verl.bad_rows import add_faults, bad_rows, is_judged, number_of, warn_of_first
from mismatch_ext.adapters.verl.block import block_of
from mismatch_ext.adapters.verl.driver.batch_checks import extra_fields
from mismatch_ext.adapters.verl.measure import BadKeys, sampled_rows
from mismatch_ext.adapters.verl.replay import PassLayout, names
from mismatch_ext.adapters.verl.rollout.client import following, present_calls
from mismatch_ext.patches.vllm.top_logprobs import SampledLogprobs
from pydantic import PrivateAttr
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils.ulysses import get_ulysses_sequence_parallel_rank, get_ulysses_sequence_parallel_world_size

from mismatch_ext.bad_rows import FEW
from mismatch_ext.errors import MismatchError, RecordError, ReplayError
from mismatch_ext.ranks import WORLD, together
from mismatch_ext.rollout import SamplingSettings, to_flags, to_ids, to_logprobs
from mismatch_ext.sampling_mask import TokenSupport, support_logprobs
from mismatch_ext.turns import Calls, Trained, masks_of

UNKNOWN = "sampling_mask_unknown"
"""Entry of a rollout's `extra_fields`: why it has no masks; absent where it has some."""
IDS, SIZES = "sampling_mask_ids", "sampling_mask_sizes"
"""Fields of a batch: the ids that were left to sample from at all tokens of a response, and how many there are at each token. A
field of verl's batches has one ragged dimension, so that ids and counts are two."""
SAMPLE = "mismatch_mask_sample"
"""Field of a batch that runs: the number of each sample."""
SHOWN = 5
"""How many rollouts without masks an error message describes."""

# The server, of which `rollout/vllm_server.py` has the class: only its own process can import vLLM's


def sampled_with(params: Any) -> SamplingSettings:
    """Return the settings by which a request of vLLM's truncates; those that cut nothing off if it is decoded greedily."""
    if not params.temperature:
        return SamplingSettings()
    return SamplingSettings(
        temperature=float(params.temperature),
        top_p=float(params.top_p),
        top_k=max(int(params.top_k), 0),
        min_p=float(params.min_p),
    )


def read(completion: Any, *, asked: int, vocabulary: int, name: str) -> TokenSupport | str:
    """Return the masks of a completion of vLLM's, or why they are unknown: an error here would only drop a rollout, silently.

    It was asked for the `asked` most likely tokens; `vocabulary` is how many its logits are over.
    """
    logprobs = completion.logprobs
    try:
        if isinstance(logprobs, SampledLogprobs):
            return logprobs.left.support(asked=asked, vocabulary=vocabulary, name=name)
        ids = [list(one) for one in logprobs or ()]
        values = [[entry.logprob for entry in one.values()] for one in logprobs or ()]
        return TokenSupport.from_top(ids, values, asked=asked, vocabulary=vocabulary, name=name)
    except MismatchError as error:
        return f"{type(error).__name__}: {error}"


# Agent loops

# verl hands out the class of a Ray actor, which cannot be derived from.
_Worker: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__ray_actor_class__  # type: ignore[attr-defined]


class MaskedLoops(_Worker):  # type: ignore[misc]
    """Runs in the Ray actors that verl starts for agent loops."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Defined here because Ray pickles an inherited `__init__` by value, and its `super()` would mean a copy of verl's class.
        super().__init__(*args, **kwargs)

    async def _run_agent_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Run an agent loop as verl does, and note its calls of the servers."""
        with following():
            return await super()._run_agent_loop(*args, **kwargs)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> Any:
        """Publish what an agent loop returned as verl does, with its masks."""
        block = block_of(self.config.actor_rollout_ref)
        # A user's own manager may be derived from ours in a run without masks.
        if not validate and block is not None and block.sampling_mask is not None:
            output = output if isinstance(output, list) else [output]
            add_masks(output, present_calls(), f"{kwargs['uid']}_{kwargs['session_id']}")
        return await super()._agent_loop_postprocess(output, validate, **kwargs)


class MaskedLoopManager(AgentLoopManagerTQ):
    """verl's manager of agent loops, with our processes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(MaskedLoops)


def add_masks(outputs: list[AgentLoopOutput], calls: Calls, name: str) -> None:
    """Add sampling masks to an agent loop's outputs, or say why one has none: verl trains without a rollout that raised."""
    for number, output in enumerate(outputs):
        logprobs = output.response_logprobs
        try:
            trained = Trained(
                prompt_ids=to_ids(output.prompt_ids, name),
                response_ids=to_ids(output.response_ids, name),
                response_mask=to_flags(output.response_mask, name),
                rollout_logprobs=None if logprobs is None else to_logprobs(logprobs, name),
            )
            support = masks_of(f"{name}_{number}", trained, calls)
        except Exception as error:  # noqa: BLE001 - raised here, it would take the rollout out of the batch in silence
            output.extra_fields[UNKNOWN] = f"{type(error).__name__}: {error}"
            support = TokenSupport.empty(len(output.response_ids), 1)  # all outputs of an answer need the same fields
        kind = _masked(type(output))
        outputs[number] = kind.model_construct(_fields_set=output.model_fields_set, **output.__dict__)
        outputs[number]._support = support  # type: ignore[attr-defined]


@cache
def _masked(kind: type[AgentLoopOutput]) -> type[AgentLoopOutput]:
    """Return a class of outputs whose masks are among the fields that it gives to a batch."""
    as_dict: Callable[[Any], dict[str, Any]] = kind.as_dict

    class MaskedOutput(kind):  # type: ignore[misc, valid-type]
        _support: TokenSupport = PrivateAttr()

        def as_dict(self) -> dict[str, Any]:
            return as_dict(self) | fields_of(self._support)

    return MaskedOutput


def fields_of(support: TokenSupport) -> dict[str, Tensor]:
    """Return masks as fields of a rollout, always of the same dtype, because verl puts several rollouts into one tensor."""
    return {IDS: support.ids.to(torch.int32), SIZES: support.counts.to(torch.int32)}


def support_of(ids: Tensor, sizes: Tensor, vocabulary: int) -> TokenSupport:
    """Return the masks that a rollout's fields hold."""
    offsets = torch.zeros(len(sizes) + 1, dtype=torch.int64)
    offsets[1:] = sizes.cpu().long().cumsum(0)
    narrow = TokenSupport.empty(0, vocabulary).ids.dtype
    return TokenSupport(ids=ids.cpu().to(narrow), offsets=offsets, vocabulary=vocabulary)


# The driver


def check_masks(batch: Any, step: int, bad: BadKeys) -> None:
    """Call rollouts bad that have no sampling masks, as the agent loops' processes found; raises RecordError if none has any."""
    keys = [batch.keys[row] for row in sampled_rows(batch)]
    if not keys:
        return
    found = {key: extra[UNKNOWN] for key, extra in extra_fields(batch) if UNKNOWN in extra}
    if len(found) == len(keys) > 1:
        first = " ".join(list(found.values())[:SHOWN])
        raise RecordError(f"none of the {len(keys)} rollouts of step {step} has sampling masks. {first}")
    for key, why in found.items():
        bad.add(key, "mask", f"rollout {key} of step {step} has no sampling masks. {why}")


# The engine


class EngineMasks:
    """Takes the log-probabilities of an engine's passes over the tokens that were left to sample from, of a vocabulary of V."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._samples: list[TokenSupport] | None = None  # of the running mini-batch
        self._faults: dict[int, str] = {}  # what is wrong with samples of the running mini-batch that are bad
        self._reports = False  # whether a rank has such samples, so that all ranks return the field of faults
        self._scored: set[int] = set()  # its samples that passes have scored
        # Ids in the masks of updates, and tokens with a mask, since `metrics` was called last.
        self._ids = self._tokens = 0

    @contextmanager
    def batch(self, data: Any, *, rank: int, forward_only: bool) -> Iterator[Any]:
        """Check the masks of a mini-batch on all ranks together, and give the batch that verl is to run in this context."""
        judged = is_judged(data, forward_only)
        with together(WORLD, flags=1) as flags:
            samples = self._read(data, rank, judged=judged)
            flags.here[0] = judged and bool(self._faults)
        (self._reports,) = flags.anywhere
        warn_of_first(self._faults)
        run = data.exclude(IDS, SIZES)  # a copy: what has been read need not be split, or moved to the device
        run[SAMPLE] = torch.arange(len(data))
        if not forward_only:
            self._ids += sum(one.ids.numel() for one in samples)
            self._tokens += sum(int((one.counts > 0).sum()) for one in samples)
        self._samples, self._scored = samples, set()
        try:
            yield run
        finally:
            self._samples = None
        if len(self._scored) < len(samples):
            raise ReplayError(
                f"mismatch.sampling_mask: verl's engine scored {len(samples) - len(self._scored)} of {len(samples)} samples "
                "without its prepare_model_outputs, where masks are applied. Remove what overrides it, or mismatch.sampling_mask."
            )

    def _read(self, data: Any, rank: int, *, judged: bool) -> list[TokenSupport]:
        """Return the masks of each sample; the position of a token has the mask of the token after it.

        A bad sample has none. If the pass is judged, samples whose masks do not fit are bad, unless that is true of all.
        """
        if IDS not in data or SIZES not in data:
            raise ReplayError(
                f"mismatch.sampling_mask, but the batch of {len(data)} samples has no {IDS!r} and {SIZES!r}: something between "
                "the agent loops and this pass dropped them, or an agent loop's process is not this package's. Pass them on with "
                "the other fields."
            )
        columns = [data[name].unbind() for name in (IDS, SIZES, "loss_mask")]
        tokens = [ids.cpu() for ids in data["input_ids"].unbind()]
        samples, wrong = list[TokenSupport](), dict[int, RecordError]()
        rows = zip(bad_rows(data), names(data, rank), tokens, *columns, strict=True)
        for row, (bad, name, ids, *masks) in enumerate(rows):
            samples.append(TokenSupport.empty(len(ids), self._vocabulary))
            if bad:
                continue
            try:
                samples[row] = _of_sample(name, ids, *masks, vocabulary=self._vocabulary)
            except RecordError as error:
                if not judged:
                    raise
                wrong[row] = error
        if len(wrong) == len(samples) >= FEW:
            raise next(iter(wrong.values()))
        self._faults = {row: str(error) for row, error in wrong.items()}
        return samples

    def outputs(self, output: Any, output_args: Any, micro_batch: Any, model_output: dict[str, Any]) -> None:
        """Replace the log-probabilities of a pass in verl's `model_output` by those over the masks of a batch that has some.

        `output` is the model's, with logits before the temperature. Raises ReplayError if verl's own are not those of these
        logits.
        """
        if self._samples is None:
            return
        numbers = micro_batch[SAMPLE].tolist()
        layout = PassLayout.of(micro_batch, output_args)
        logits = output.logits.full_tensor() if isinstance(output.logits, DTensor) else output.logits
        logits = logits.reshape(-1, logits.shape[-1])
        # As verl's own: the last token of a row is scored against the first one of the next.
        following_ids = layout.rows(micro_batch["input_ids"].values().roll(-1), 0)
        temperatures = torch.as_tensor(micro_batch["temperature"]).unique().tolist()
        if len(temperatures) > 1:
            raise ReplayError(
                f"a batch with sampling masks has temperatures {temperatures}; allowed: one for all samples."
            )
        (temperature,) = temperatures
        found = support_logprobs(
            logits, following_ids, self._rows(numbers, layout, len(logits)), temperature=temperature
        )
        found = layout.tokens(found)
        self._check_logits(logits, following_ids, temperature, layout, model_output["log_probs"].values())
        model_output["log_probs"] = torch.nested.nested_tensor_from_jagged(found, layout.offsets)
        if self._reports:
            faults = [number_of("mask") if number in self._faults else 0 for number in numbers]
            of_tokens = torch.tensor(faults, device=layout.offsets.device)[layout.sample]
            add_faults(model_output, of_tokens, layout.offsets)
        self._scored.update(numbers)

    def _rows(self, numbers: list[int], layout: PassLayout, rows: int) -> TokenSupport:
        """Return the masks of a pass's rows of logits."""
        assert self._samples is not None
        samples = [self._samples[number] for number in numbers]
        if layout.padding is None:
            return TokenSupport.joined([one.padded(rows // len(samples)) for one in samples])
        ranks = get_ulysses_sequence_parallel_world_size() if layout.shared else 1
        first = rows * get_ulysses_sequence_parallel_rank() if layout.shared else 0
        return TokenSupport.joined(samples).padded(rows * ranks).slice(first, first + rows)

    def _check_logits(
        self, logits: Tensor, labels: Tensor, temperature: float, layout: PassLayout, native: Tensor
    ) -> None:
        """Refuse logits, tokens or a temperature that are not those of which verl takes log-probabilities, by the first token."""
        with torch.no_grad():
            own = (logits[:1].double() / temperature).log_softmax(-1).gather(-1, labels[:1, None])[:, 0]
            ours, theirs = float(layout.tokens(own.expand(len(logits)))[0]), float(native[0])
        if not abs(ours - theirs) < 0.1 + 0.02 * abs(ours):  # verl's may be rounded to half precision
            raise ReplayError(
                f"mismatch.sampling_mask: verl's engine gives the first token log-probability {theirs:.4f}, and the model's "
                f"logits at temperature {temperature:g} give {ours:.4f}: verl computes it from something "
                "else. Install a version of verl that was run, or remove mismatch.sampling_mask."
            )

    def metrics(self) -> dict[str, float]:
        """Return the mean size of the masks that were trained on since the last call; all ranks must call this."""
        mine = torch.tensor([self._ids, self._tokens], dtype=torch.float64)
        total, count = WORLD.sum(mine).tolist()
        self._ids = self._tokens = 0
        return {"sampling_mask_size": total / count} if count else {}


def _of_sample(
    name: str, tokens: Tensor, ids: Tensor, sizes: Tensor, loss_mask: Tensor, *, vocabulary: int
) -> TokenSupport:
    """Return the masks of one sample `[T]`; none where it has no loss, as those with which verl fills batches up."""
    mask = loss_mask.cpu().bool()
    if not bool(mask.any()):
        return TokenSupport.empty(len(tokens), vocabulary)
    support, given = support_of(ids, sizes, vocabulary), len(tokens) - len(mask)
    try:
        support.check_sampled(tokens[given:].tolist(), mask.tolist(), name)
    except RecordError as error:
        raise RecordError(
            f"mismatch.sampling_mask: {error} Give a pass the tokens that were sampled, with {IDS!r} and {SIZES!r} of their rows."
        ) from error
    return TokenSupport.joined([TokenSupport.empty(given - 1, vocabulary), support, TokenSupport.empty(1, vocabulary)])
