"""verl's SGLang server, which says what it runs with and looks at each answer before verl takes it.

verl reads an answer without log-probabilities as an empty one, and trains without a rollout that failed. It cannot read SGLang's
routes, which are text since 0.5.12. Here the functions of `mismatch_ext.adapters.sglang` check each answer and decode its routes.
Refusals are kept for the trainer, which asks for them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import ray
import sglang
import torch
from mismatch_ext.adapters import compat
from mismatch_ext.adapters.sglang import RoutingShape, parse_response, read_server, to_provenance
from mismatch_ext.adapters.sglang.answers import decode_routes
from mismatch_ext.adapters.sglang.engine import ORIGINAL_LOGPROB
from mismatch_ext.adapters.transformers.routing.layout import sizes_of_config
from mismatch_ext.adapters.verl.block import block_of_server
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer, SGLangReplica

from mismatch_ext.errors import MismatchError, RoutingError
from mismatch_ext.patching import active_patches, digest_of
from mismatch_ext.precision.dtypes import canonical
from mismatch_ext.rollout import SamplingSettings

_OF_VERL: ContextVar[bool] = ContextVar("mismatch_of_verl", default=False)
KEPT = 20
"""How many refused answers are described to the trainer; all are counted."""

PLAIN = (str, int, float, bool, type(None), list, tuple, dict)


class MismatchSGLangServer(SGLangHttpServer):
    """Runs in the Ray actor that verl starts for a rollout server."""

    _refused: int = 0

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        """Start SGLang as verl does, and look at what it answers from then on."""
        self._refusals: list[str] = []
        block = block_of_server(self.config)
        self._acts = block is None or block.acts
        if block is not None and block.acts:
            compat.check(("verl",), block.features, {"verl", "sglang"})
        await super().launch_server(*args, **kwargs)
        if self.node_rank == 0:
            # Sampling and version are placeholders: the records that this makes are only checked, and none is kept.
            self._provenance = to_provenance(read_server(self._info()), sampling=SamplingSettings(), weight_version=0)
            self._generate = self.tokenizer_manager.generate_request
            self.tokenizer_manager.generate_request = self._generate_checked

    async def mismatch_report(self) -> dict[str, Any]:
        """Return the server's settings."""
        info = self._info()
        return {
            "records_routing": bool(info.get("enable_return_routed_experts")),
            "reading": dataclasses.asdict(read_server(info)),
            "patch_digest": digest_of(active_patches()),
            "weight_version": self.global_steps,
            "server": info,
        }

    async def mismatch_refusals(self) -> tuple[int, list[str]]:
        """Return how many answers were refused since the last call, and the messages of the first ones."""
        found = self._refused, self._refusals
        self._refused, self._refusals = 0, []
        return found

    def _info(self) -> dict[str, Any]:
        """Return what SGLang's own report would say, and what it leaves out, for example the dtype that "auto" became."""
        manager = self.tokenizer_manager
        settings = dataclasses.asdict(manager.server_args)
        quantization = settings.get("quantization") or getattr(manager.model_config, "quantization", None)
        return {
            **{name: value for name, value in settings.items() if isinstance(value, PLAIN)},
            "dtype": canonical(manager.model_config.dtype),
            "quantization": quantization,
            "version": sglang.__version__,
            # SGLang's processes inherited this one's environment.
            ORIGINAL_LOGPROB: os.environ.get(ORIGINAL_LOGPROB, "false").lower() in ("1", "true"),
        }

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a request of verl's. Only these are checked; requests to SGLang's other endpoints, such as health, are not."""
        token = _OF_VERL.set(True)
        try:
            return await super().generate(*args, **kwargs)
        finally:
            _OF_VERL.reset(token)

    async def _generate_checked(self, request: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Answer as SGLang does; if an answer is one that verl could not use, tell the trainer, and raise if the block acts."""
        async for output in self._generate(request, *args, **kwargs):
            if _OF_VERL.get():
                try:
                    # Off the loop: a long response has megabytes of routes.
                    await asyncio.to_thread(self._ingest, request, output)
                except MismatchError as error:
                    self._refused += 1
                    if len(self._refusals) < KEPT:
                        self._refusals.append(f"{type(error).__name__}: {error}")
                    if self._acts:
                        raise
            yield output

    def _ingest(self, request: Any, output: dict[str, Any]) -> None:
        """Check an answer; if the block acts, put its routes in the form that verl reads."""
        prompt, name, meta = list(request.input_ids), str(request.rid), output["meta_info"]
        takes_routes = self._acts and self.config.enable_rollout_routing_replay
        if takes_routes and (request.image_data or request.video_data):
            raise RoutingError(
                f"request {name}: mismatch.routing with images or video, of which no token id tells what they show, so that a "
                "pass of the trainer cannot be shown to be the one that its routes are of; remove mismatch.routing for this data."
            )
        # A turn with no room left asks for no token, so its answer has no log-probabilities.
        empty = request.sampling_params.get("max_new_tokens") == 0
        if request.return_logprob and not empty:
            parse_response(output, prompt_ids=prompt, provenance=self._provenance, request_id=name, allow_abort=True)
        ids = output.get("output_ids") or []
        routes = meta.get("routed_experts")
        if takes_routes and not (routes is None and not ids):
            rows, shape = max(len(prompt) + len(ids) - 1, 0), self._shape()
            experts = decode_routes(routes, rows=rows, shape=shape, request=name)
            if experts.size and not 0 <= experts.min() <= experts.max() < shape.num_experts:
                raise RoutingError(
                    f"request {name}: expert ids from {experts.min()} to {experts.max()}; allowed: 0 to {shape.num_experts - 1}."
                )
            # verl keeps 16 bits.
            meta["routed_experts"] = torch.from_numpy(np.ascontiguousarray(experts, dtype=np.int16))

    def _shape(self) -> RoutingShape:
        """Return what a row of routes looks like; only the trainer's model knows which of the layers have experts."""
        text = self.model_config.hf_config.get_text_config()
        layers = int(text.num_hidden_layers)
        num_experts, top_k = sizes_of_config(text)
        return RoutingShape(num_layers=layers, layers=tuple(range(layers)), num_experts=num_experts, top_k=top_k)


class MismatchSGLangReplica(SGLangReplica):
    """verl's replica, with our server in it where it samples for the actor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not (self.is_reward_model or self.is_teacher_model):
            self.server_class = ray.remote(MismatchSGLangServer)
