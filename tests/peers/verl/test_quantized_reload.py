"""What verl sends to a vLLM that quantizes while it loads, taken by vLLM's own reload: nothing of an update is lost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.verl.in_process import scenarios_reload as scenarios
else:
    scenarios = named("tests.peers.verl.in_process.scenarios_reload")


def test_buffers_are_updated_with_the_layers_beside_them(run: Run, tmp_path: Path) -> None:
    sent = [{"proj.weight": 2.0, "layer_scalar": 7.0}, {"layer_scalar": 8.0, "proj.weight": 3.0}]
    found = run(scenarios.updates, folder=tmp_path, sent=[*sent, {"proj.weight": 4.0}]).expect()
    assert found[:2] == [{name: [value] for name, value in values.items()} for values in sent]
    # Of an update without buffers, they keep their last values.
    assert found[2] == {"proj.weight": [4.0], "layer_scalar": [8.0]}


def test_a_buffer_that_the_reload_has_lost_is_named(run: Run, tmp_path: Path) -> None:
    sent = [{"proj.weight": 2.0, "layer_scalar": 7.0}]
    (error,) = run(scenarios.updates, folder=tmp_path, sent=sent, lost=True).expect()
    assert "no buffer 'layer_scalar' any more" in error
