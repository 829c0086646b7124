"""verl's vLLM server for runs with `mismatch.sampling_mask`: with each answer go the tokens that were left to sample from."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextvars import ContextVar
from typing import Any

import ray
from mismatch_ext.adapters import compat
from mismatch_ext.adapters.verl.block import block_of_server
from mismatch_ext.adapters.verl.rollout.client import MASKS
from mismatch_ext.adapters.verl.sampling_mask import read, sampled_with
from mismatch_ext.patches.vllm.top_logprobs import top_logprobs
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from mismatch_ext.config import SamplingMaskConfig
from mismatch_ext.errors import MismatchError
from mismatch_ext.patching import apply, described
from mismatch_ext.sampling_mask import TokenSupport

_OF_VERL: ContextVar[list[TokenSupport | str] | None] = ContextVar("mismatch_masks_of_verl", default=None)


class MismatchVLLMServer(vLLMHttpServer):
    """Runs in the Ray actor that verl starts for a rollout server."""

    mismatch_masks = False
    """Whether answers have masks."""
    mismatch_patches: tuple[Mapping[str, Any], ...] = ()
    """Descriptions of the patches that are in place in this process."""

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        """Start vLLM as verl does, and read the masks off what it answers from then on."""
        block = block_of_server(self.config)
        if block is not None:
            compat.check(("verl",), block.features, {"verl", "vllm"})
        # vLLM's outputs are put together in this process.
        apply(*top_logprobs())
        self.mismatch_patches = tuple(described(*top_logprobs()))
        await super().launch_server(*args, **kwargs)
        if self.node_rank == 0 and block is not None and block.sampling_mask is not None:
            self._section: SamplingMaskConfig = block.sampling_mask
            model = self.engine.vllm_config.model_config
            self._vocabulary = int(model.get_vocab_size())
            self._most = self._vocabulary if model.max_logprobs < 0 else min(self._vocabulary, int(model.max_logprobs))
            engine: Any = self.engine
            self._generate: Any = engine.generate
            engine.generate = self._generate_masked
            self.mismatch_masks = True

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a request of verl's, with its masks or the reason why they are unknown."""
        masks: list[TokenSupport | str] = []
        token = _OF_VERL.set(masks)
        try:
            output = await super().generate(*args, **kwargs)
        finally:
            _OF_VERL.reset(token)
        if masks:
            output.extra_fields[MASKS] = masks[0]
        return output

    async def _generate_masked(
        self, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """Answer as vLLM does, and keep the masks of verl's requests whose sampling cuts something off."""
        masks, asked, output = _OF_VERL.get(), None, None
        if masks is not None and sampling_params.logprobs is not None:
            if (sampling := sampled_with(sampling_params)).truncates_support:
                try:
                    # A request that cuts off less than the run's may need more than vLLM's limit.
                    asked = min(self._section.asked(sampling), self._most)
                except MismatchError as error:
                    masks.append(f"{type(error).__name__}: {error}")
        if asked is not None:
            sampling_params = sampling_params.clone()
            sampling_params.logprobs = asked
        async for output in self._generate(prompt, sampling_params, *args, **kwargs):
            yield output
        if masks is not None and asked is not None and output is not None and output.outputs:
            name = str(output.request_id)
            masks.append(read(output.outputs[0], asked=asked, vocabulary=self._vocabulary, name=name))


class MismatchVLLMReplica(vLLMReplica):
    """verl's replica, with our server in it where it samples for the actor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not (self.is_reward_model or self.is_teacher_model):
            self.server_class = ray.remote(MismatchVLLMServer)
