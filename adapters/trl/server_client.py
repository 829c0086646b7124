"""TRL's client of a vLLM server, as a subclass: every request has an end, every update a name, and routes are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mismatch_ext.adapters.vllm.http import COMPLETIONS, ServerHttp
from mismatch_ext.adapters.vllm.remote import RemoteEngine
from mismatch_ext.adapters.vllm.server.plugin import BACKEND
from mismatch_ext.adapters.vllm.stamps import Stamps, is_fresh
from torch import Tensor

if TYPE_CHECKING:
    from trl.generation.vllm_client import VLLMClient as _Base
else:
    _Base = object

GENERATING = (COMPLETIONS, "/v1/chat/completions", "/inference/v1/generate")
"""Paths that may take any time."""
SILENCE = 240.0
"""Seconds that an engine may be silent where TRL was told none; TRL's own default."""


Check = Callable[[RemoteEngine, str], None]
"""Refuses a server, that is up and that nothing was sent to, for a trainer on a type of device."""


class CheckedClient(_Base):
    """The methods that are overridden; `client_of` puts them before TRL's class."""

    check_server_of: Check
    remote: RemoteEngine
    # What the server has answered to generations, while somebody collects it.
    choices: list[dict[str, Any]] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._silence = kwargs.get("connection_timeout") or SILENCE
        self.stamps = Stamps()
        super().__init__(*args, **kwargs)

    @cached_property
    def http(self) -> ServerHttp:
        """The server; TRL asks it before its constructor has ended."""
        return ServerHttp(self.base_url, self.session, self._silence)

    def _get(self, url: str, **kwargs: Any) -> Any:
        path = url.removeprefix(self.base_url)
        return self.http.json("GET", path, **kwargs)

    def _post(self, url: str, **kwargs: Any) -> Any:
        path = url.removeprefix(self.base_url)
        if path not in GENERATING:
            return self.http.json("POST", path, **kwargs)
        answer = self.http.generate(path, **kwargs)
        if self.choices is not None and path == COMPLETIONS:
            self.choices += answer["choices"]
        return answer

    def init_communicator(self, device: Any = 0, *args: Any, **kwargs: Any) -> None:
        """Check the server, then agree with it on how weights travel."""
        self.remote = RemoteEngine(self.http)
        is_fresh(self.remote)  # raises if an update failed half-way
        self.check_server_of(self.remote, getattr(device, "type", "cuda"))
        if self.remote.backend == BACKEND:
            self.http.post("/init_weight_transfer_engine", {"init_info": {}})
        else:
            super().init_communicator(device, *args, **kwargs)

    def update_named_params(
        self, metadata: Any, named_params: Iterator[tuple[str, Tensor]], *args: Any, **kwargs: Any
    ) -> None:
        """Update weights as TRL does, in the bodies of requests where the server takes them so."""
        if self.remote.backend != BACKEND:
            super().update_named_params(metadata, named_params, *args, **kwargs)
            return
        if not self._updating_weights:
            self._start_weight_update()
        self.remote.send(named_params)
        if not self._updating_weights:
            self._finish_weight_update()

    def _start_weight_update(self, *args: Any, **kwargs: Any) -> None:
        self.expect_own_weights()
        self.remote.weight_version = self.stamps.begin()
        super()._start_weight_update(*args, **kwargs)

    def _finish_weight_update(self) -> None:
        self.http.post("/finish_weight_update", {"weight_version": self.stamps.end()})

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self.http.reset_prefix_cache("after")

    def expect_own_weights(self, timeout: float | None = None) -> None:
        """Refuse to go on where the server does not hold this trainer's last update; `timeout` in seconds, or the client's."""
        self.stamps.expect_on(self.remote, timeout)


def client_of(check: Check) -> Callable[[type], type]:
    """Return the handler of a patch, which puts our methods before those of TRL's class."""

    def subclass(base: type) -> type:
        return type(base.__name__, (CheckedClient, base), {"check_server_of": staticmethod(check)})

    return subclass
