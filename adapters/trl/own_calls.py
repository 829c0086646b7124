"""Records of what a `rollout_func` asks of the trainer's own vLLM without TRL's wrapper.

A `rollout_func` may generate by `trainer.vllm_generation.generate`, which records by itself, or by `trainer.vllm_generation.llm`
with sampling parameters of its own. These have to be the ones that the trainer scores with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

from mismatch_ext.adapters import vllm as engine
from mismatch_ext.adapters.trl.overridden import overridden, shadowed

from mismatch_ext.errors import RecordError
from mismatch_ext.records import RolloutRecord

if TYPE_CHECKING:
    from mismatch_ext.adapters.trl.generation import CheckedGeneration


@contextmanager
def own_calls(generation: CheckedGeneration, records: list[RolloutRecord]) -> Iterator[None]:
    """Record, for the time of a block, calls of `LLM.generate` that do not come from TRL's wrapper.

    Args:
        generation: The wrapper of an engine in this process.
        records: Takes what was sampled, in the order of the calls.
    """
    llm = generation.llm
    plain: Callable[..., Any] = llm.generate

    @wraps(plain)
    def generate(*args: Any, **kwargs: Any) -> Any:
        if generation.calling:
            return plain(*args, **kwargs)
        generation.send_moved()
        verdicts = generation.verdicts
        version = None if verdicts.observes else lambda: generation.weight_version
        with overridden(generation, calling=True), generation.engine.captured(version):
            outputs = llm.generate(*args, **kwargs)
        with verdicts.checking("records"):
            given = kwargs["sampling_params"] if "sampling_params" in kwargs else (*args, None, None)[1]
            given = llm.get_default_sampling_params() if given is None else given
            each = given if isinstance(given, Sequence) else [given] * len(outputs)
            for output, asked in zip(outputs, each, strict=True):
                records.extend(_of(generation, output, asked))
        return outputs

    with shadowed(llm, generate=generate):
        yield


def _of(generation: CheckedGeneration, output: Any, asked: Any) -> list[RolloutRecord]:
    """Return the records of one request.

    Args:
        generation: The wrapper.
        output: vLLM's output.
        asked: vLLM's sampling parameters.

    Raises:
        RecordError: It was sampled with other settings than the trainer scores with, or nothing says how likely its tokens were.
    """
    settings = {name: getattr(asked, name) for name in vars(generation.sampling)}
    for name, expected in vars(generation.sampling).items():
        # vLLM has two ways to say that top_k keeps all.
        if (max(settings[name], 0) if name == "top_k" else settings[name]) != max(expected, 0):
            raise RecordError(
                f"rollout_func asked vLLM for {name}={settings[name]!r}, and the trainer scores with {expected!r}: its "
                f"tokens are not the policy's that is trained. Sample with {name}={expected!r}, or set it in the trainer's "
                "configuration."
            )
    return engine.to_records(
        [output],
        prompt_ids=[output.prompt_token_ids],
        provenance=generation.provenance(),
        shape=None if generation.layout is None else generation.layout.shape,
        routed_experts_start=getattr(asked, "routed_experts_prompt_start", None) or 0,
        n=len(output.outputs),
    )
