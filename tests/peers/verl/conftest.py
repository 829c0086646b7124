"""What tests of verl's settings share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata

import pytest

from mismatch_ext import versions

KNOWN_WRONG = versions.KNOWN_WRONG


@pytest.fixture(scope="module")
def hydra() -> Iterator[None]:
    """Let tests compose verl's configuration, with the package loaded."""
    from hydra import initialize_config_module
    from mismatch_ext.adapters.verl import plugin

    plugin.load()
    with initialize_config_module(version_base=None, config_module="verl.trainer.config"):
        yield
    plugin.unload()  # other tests of this process look at what is patched


@pytest.fixture
def as_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what is known to be wrong with vLLM on a CPU alone, as older vLLM's routes are: settings are the same there."""
    monkeypatch.setattr(versions, "KNOWN_WRONG", tuple(wrong for wrong in KNOWN_WRONG if wrong.condition != "on a CPU"))


@pytest.fixture
def installed_is(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return a function that lets the metadata say which version of a distribution is installed."""
    real = metadata.version

    def install(distribution: str, version: str) -> None:
        monkeypatch.setattr(metadata, "version", lambda name: version if name == distribution else real(name))

    return install


@pytest.fixture
def sglang_is(installed_is: Callable[[str, str], None]) -> Callable[[str], None]:
    """Return a function that lets the metadata say which SGLang is installed: this environment has none."""
    return partial(installed_is, "sglang")
