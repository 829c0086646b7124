"""The methods of verl's FSDP engine that run its model: which passes are replayed, recorded, or left to the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from mismatch_ext.adapters.verl.worker import samples
from mismatch_ext.adapters.verl.worker.replay import FIELD, TOKENS, TRAIN, EngineReplay, SampleRoutes
from mismatch_ext.adapters.verl.worker.ulysses import Share
from verl.utils import tensordict_utils as tu

from mismatch_ext.errors import RoutingError
from mismatch_ext.ranks import WORLD, gathered, together
from mismatch_ext.routing.replay import REFERENCE

if TYPE_CHECKING:
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead as _Host
else:
    _Host = object

ROW = "mismatch_row"
NATIVE = "mismatch_native"
"""Entry of a batch that asks for a pass without replay, to measure the gap that replay closes."""


class RoutingMixin(_Host):
    """Overrides the methods of verl's engine that run its model; the engine sets `_replay`."""

    _replay: EngineReplay | None = None
    weight_version: int | None = None  # version that the rollout engine was sent last; None if none was sent from here
    _routes: list[SampleRoutes] | None = None  # routes of the running mini-batch
    _recording = False
    moved = False  # whether an update has moved the weights since the rollout engine was sent them
    _adapter_off = False

    @property
    def _trains(self) -> bool:
        return not self.engine_config.forward_only

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Run the model without its adapter as the parent does: that is the reference policy."""
        self._adapter_off = True
        try:
            with super().disable_adapter():
                yield
        finally:
            self._adapter_off = False

    def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any], forward_only: bool = False) -> Any:
        """Run a mini-batch as the parent does, under the routes that travel with its samples.

        Raises:
            RoutingError: A sample's routes are missing, malformed, or in an update of other tokens, on any rank; names it. No
                forward pass has run then.
            ReplayError: A forward pass did not obey them.
        """
        replay = self._replay
        if replay is None or self._routes_natively(data):
            return super().forward_backward_batch(data, loss_function, forward_only)
        reference = self._is_reference
        self._recording = replay.config.mode == "R2" and forward_only and not reference
        others = False
        try:
            with together(WORLD):
                if self._recording:
                    # If the batch has routes already, they would be replaced by those that are recorded of other tokens.
                    others = data.get(FIELD, None) is not None and bool(samples.altered(data))
                else:
                    others = self._is_of_other_tokens(data, forward_only)
                    self._routes = self._ingested(replay, data)
            if any(gathered(others)):
                # Somebody asks for scores of altered samples, which are not trained on: the model routes them itself.
                replay.others[TRAIN] += 1
                self._routes, self._recording = None, False
                return super().forward_backward_batch(data, loss_function, forward_only)
            data = data.exclude(FIELD, TOKENS)  # a copy: what was ingested need not be split, or moved to the device
            data[ROW] = torch.arange(len(data))
            return super().forward_backward_batch(data, loss_function, forward_only)
        finally:
            self._routes, self._recording = None, False

    def _ingested(self, replay: EngineReplay, data: Any) -> list[SampleRoutes]:
        replay.weight_version = self.weight_version
        rows, names = samples.needed(data), samples.names(data, self.rank)
        return replay.ingest(samples.routes(data), samples.tokens(data), rows, names, samples.versions(data))

    def _is_of_other_tokens(self, data: Any, forward_only: bool) -> bool:
        """Tell whether samples have other tokens than their routes were recorded of; an update refuses such samples."""
        altered = samples.altered(data)
        if altered and not forward_only:
            name = samples.names(data, self.rank)[altered[0]]
            raise RoutingError(samples.ALTERED.format(name, len(altered), len(data)))
        return bool(altered)

    @property
    def _is_reference(self) -> bool:
        return not self._trains or self._adapter_off

    def _routes_natively(self, data: Any) -> bool:
        assert self._replay is not None
        asked = bool(tu.get_non_tensor_data(data=data, key=NATIVE, default=False))
        return asked or (self._is_reference and not self._replay.config.reference)

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        """Run a micro-batch as the parent does, recorded or replayed."""
        replay = self._replay
        if replay is None or not (self._recording or self._routes is not None):
            return super().forward_step(micro_batch, loss_function, forward_only)
        packed, share = int(micro_batch["input_ids"].offsets()[-1]), Share.present()
        padding = self._get_packed_pad_size(packed)
        rows = samples.rows_of(micro_batch, padding + share.filling(packed + padding))
        if self._routes is not None:
            routes = [self._routes[row] for row in micro_batch[ROW].tolist()]
            # Where rollouts are of older weights, routes are compared by those that were sent: an update's scores come before it.
            drifted = replay.takes_older and self.moved and not forward_only
            split = REFERENCE if self._is_reference or drifted else TRAIN
            with replay.over_samples(routes, rows, split=split, share=share):
                return super().forward_step(micro_batch, loss_function, forward_only)
        ids = samples.tokens(micro_batch)
        with replay.recording(rows, ids, share) as recorded:
            loss, output = super().forward_step(micro_batch, loss_function, forward_only)
        output["model_output"][FIELD] = torch.nested.as_nested_tensor(recorded, layout=torch.jagged)
        of = [own.to(recorded[0].device) for own in ids]
        output["model_output"][TOKENS] = torch.nested.as_nested_tensor(of, layout=torch.jagged)
        return loss, output
