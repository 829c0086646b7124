"""Random numbers of passes that a plain run does not make."""

from __future__ import annotations

import warnings

import pytest
import torch

from mismatch_ext.rng import forked_rng


def test_numbers_go_on_and_other_devices_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    before = torch.get_rng_state()
    with warnings.catch_warnings(action="error"), forked_rng(torch.device("cpu")):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
