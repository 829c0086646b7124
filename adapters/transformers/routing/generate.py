"""Record the experts of transformers' own `generate`: a trace per sequence, as from a rollout engine.

Shapes: B sequences, P prompt positions (left-padded), T new tokens, L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from mismatch_ext.adapters.transformers.routing.binding import Binding
from mismatch_ext.adapters.transformers.routing.layout import MoeLayout
from mismatch_ext.adapters.transformers.routing.record import Recording
from mismatch_ext.adapters.transformers.routing.session import Forward
from torch import Tensor, nn
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from mismatch_ext.errors import ReplayError
from mismatch_ext.routing import RoutingTrace


class GenerationRecording(Recording):
    """Routes of the sequences that were generated under `record_generation`.

    Args:
        layout: The model's routers.
        version: Version of the policy that samples.

    Attributes:
        traces: A trace per sequence, in the order of `generate`'s results, call after call. It has a row for each token of prompt
            and response except the last one, which the model never sees. It has no rows for padding, for anything after the end
            of a sequence, or for the passes of a rank that only waits for other ranks under FSDP.
    """

    def __init__(self, layout: MoeLayout, version: int = 0) -> None:
        super().__init__(layout, version)
        self.traces: list[RoutingTrace] = []
        self._steps: list[Tensor] | None = None  # None outside of generate
        self._mask: Tensor | None = None

    def finish(self, forward: Forward) -> None:
        """Keep a step's routes `[B, S, L, K]`, and the first step's attention mask; ignore passes outside of `generate`."""
        if self._steps is None:
            return
        args, kwargs = forward.arguments
        tokens = next(x for x in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args) if isinstance(x, Tensor))
        step = self.routes(forward)
        if not self._steps:
            self._mask = kwargs.get("attention_mask")
        self._steps.append(step.view(len(tokens), -1, *step.shape[1:]))

    def begin(self) -> None:
        """Start a call of `generate`, and forget what a failed call left."""
        self._steps, self._mask = [], None

    def collect(self, model: Any, inputs: Tensor | None, output: Any, settings: dict[str, Any]) -> None:
        """Turn the steps of one call of `generate` into traces.

        Args:
            model: The model that generated.
            inputs: Prompts `[b, P]`, as given; B is b times the number of sequences returned for each prompt.
            output: What `generate` returned.
            settings: The other arguments of `generate`.

        Raises:
            ReplayError: The steps do not match the sequences, or padding cannot be told from tokens.
        """
        sequences = output if isinstance(output, Tensor) else output.sequences
        if inputs is None or inputs.dim() != 2:
            raise ReplayError("generation is recorded from prompts given as input_ids; they were not.")
        width, total = inputs.shape[1], sequences.shape[1]
        steps, self._steps = torch.cat(self._steps or [torch.empty(0, 0)], dim=1), None
        if _keeps_pace(model, settings):
            steps = steps[:, : total - 1]
        if len(steps) != len(sequences) or steps.shape[1] != total - 1:
            raise ReplayError(
                f"{self.layout.family}: generating {tuple(sequences.shape)} tokens ran {len(steps)} x {steps.shape[1]} through "
                f"the routers, not {len(sequences)} x {total - 1}: each but the last, once. Generate by sampling or greedily, "
                "with the KV cache, without an assistant and without a cache of earlier calls."
            )
        mask = _prompt_mask(self._mask, settings.get("attention_mask"), len(sequences), width)
        ends = _response_lengths(model, sequences[:, width:].cpu(), settings)
        for row, length in zip(range(len(sequences)), ends, strict=True):
            real = torch.zeros(total, dtype=torch.bool)
            real[:width] = mask[row]
            real[width : width + length] = True
            positions = real.nonzero().flatten()[:-1]
            part = steps[row].index_select(0, positions.to(steps.device))
            self.traces.append(
                RoutingTrace(
                    parts=(part,),
                    layers=self.layout.layers,
                    num_experts=self.layout.num_experts,
                    versions=((0, self._version),),
                    tokens=sequences[row].cpu()[positions].to(torch.int32),
                )
            )


@contextmanager
def record_generation(model: nn.Module, *, version: int = 0) -> Iterator[GenerationRecording]:
    """Record the experts of every call of `generate`, by sampling or greedily, with the KV cache.

    Args:
        model: A transformers model, possibly wrapped by PEFT.
        version: Version of the policy that samples, for the traces.

    Yields:
        The recording; `recording.traces` after each call.

    Raises:
        ReplayError: The model's routing cannot be recorded, or tokens did not go through the routers one by one (beam
            search, assisted generation, no cache).
    """
    binding = Binding.of(model)
    recording = GenerationRecording(binding.layout, version)
    generator = _generator(model, binding.layout)
    before = vars(generator).get("generate")
    plain = generator.generate

    def generate(inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        _refuse_mode(generator, args, kwargs, recording.layout.family)
        recording.begin()
        output = plain(inputs, *args, **kwargs)
        given = inputs if inputs is not None else kwargs.get("input_ids")
        settings = kwargs if not args else {**kwargs, "generation_config": args[0]}
        recording.collect(generator, given, output, settings)
        return output

    vars(generator)["generate"] = generate
    try:
        with binding.active(recording):
            yield recording
    finally:
        vars(generator).pop("generate")
        if before is not None:
            vars(generator)["generate"] = before


def _generator(model: nn.Module, layout: MoeLayout) -> Any:
    """Return the innermost module with `generate`; the wrappers around it call this one."""
    found = [
        module
        for module in model.modules()
        if callable(getattr(type(module), "generate", None))
        and any(part is layout.decoder for part in module.modules())
    ]
    if not found:
        raise ReplayError(f"{layout.family}: {type(model).__name__} has no generate().")
    return found[-1]


def _setting(model: Any, name: str, kwargs: dict[str, Any]) -> Any:
    """Return a generation setting from where `generate` finds it first: the call, its config, or the model's config."""
    holders = (kwargs.get("generation_config"), model.generation_config)
    return next(
        (v for v in (kwargs.get(name), *(getattr(h, name, None) for h in holders if h is not None)) if v is not None),
        None,
    )


def _keeps_pace(model: Any, settings: dict[str, Any]) -> bool:
    """Tell whether a rank that has finished goes on running the model, because other ranks need its shards to finish."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    synced = settings.get("synced_gpus")
    return bool(is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model) if synced is None else synced)


def _refuse_mode(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], family: str) -> None:
    """Refuse ways of generating in which a sequence's tokens do not come from one row of the batch."""
    settings = {**kwargs, "generation_config": args[0]} if args else kwargs
    for name, fine in (
        ("num_beams", (None, 1)),
        ("prompt_lookup_num_tokens", (None,)),
        ("penalty_alpha", (None, 0, 0.0)),
    ):
        if (value := _setting(model, name, settings)) not in fine:
            raise ReplayError(
                f"{family}: generation with {name}={value} cannot be recorded: a sequence's tokens are not those of one row, "
                "step by step. Sample or decode greedily."
            )
    if kwargs.get("assistant_model") is not None or kwargs.get("custom_generate") is not None:
        raise ReplayError(f"{family}: assisted or custom generation cannot be recorded; sample or decode greedily.")


def _prompt_mask(seen: Any, given: Any, sequences: int, width: int) -> Tensor:
    """Return True at the prompts' real tokens `[B, P]`, by the mask that the model saw, or otherwise by the caller's."""
    for mask in (seen, given):
        if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] == width and sequences % len(mask) == 0:
            return mask.cpu().bool().repeat_interleave(sequences // len(mask), 0)
    if seen is None:
        return torch.ones(sequences, width, dtype=torch.bool)
    raise ReplayError("which tokens of the prompts are padding cannot be told; pass attention_mask to generate().")


def _response_lengths(model: Any, responses: Tensor, settings: dict[str, Any]) -> list[int]:
    """Return the number of tokens of each response, its end-of-sequence token included."""
    ends = _setting(model, "eos_token_id", settings)
    ids = torch.tensor([ends] if isinstance(ends, int) else list(ends or []), dtype=responses.dtype)
    ended = torch.isin(responses, ids)
    width = responses.shape[1]
    lengths = torch.where(ended.any(1), ended.to(torch.uint8).argmax(1) + 1, width)
    pad = _setting(model, "pad_token_id", settings)
    if (
        pad is not None
        and pad not in ids.tolist()
        and (_setting(model, "stop_strings", settings) or settings.get("stopping_criteria"))
    ):
        # A sequence that was stopped in another way is filled up with padding.
        kept = (responses != pad).flip(1).to(torch.uint8)
        lengths = torch.minimum(lengths, torch.where(kept.any(1), width - kept.argmax(1), 0))
    return lengths.tolist()
