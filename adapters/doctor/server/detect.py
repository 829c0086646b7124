"""Which server listens at an address, what it says of itself, and whether the doctor's requests fit it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mismatch_ext.adapters.doctor.server.client import Client
from mismatch_ext.adapters.sglang.fields import brief

from mismatch_ext.errors import ConfigError
from mismatch_ext.precision.names import NAMES, spelled
from mismatch_ext.strict import suggestion
from mismatch_ext.versions import PEERS

COMMON = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop_token_ids",
    "ignore_eos", "logit_bias",
)  # fmt: skip
# Settings of requests, by the engine's kind: of vLLM's /v1/completions, which leaves out unknown ones without a word, and of
# SGLang's /generate, which refuses them.
SAMPLING = {
    "vllm": (*COMMON, "min_tokens", "seed", "allowed_token_ids"),
    "sglang": (*COMMON, "min_new_tokens", "sampling_seed", "stop", "stop_regex", "no_stop_trim"),
}
SEEDS = {"vllm": "seed", "sglang": "sampling_seed"}
"""What the two call the seed of sampling."""
NAMED = {"vllm": "vLLM", "sglang": "SGLang"}
# What servers say where nothing was set.
UNSAID: tuple[Any, ...] = (None, "", "auto", "default", {}, "{}", False)
# Of SGLang's report: what changes its numbers or its tokens.
REPORTED = (
    "quantization", "kv_cache_dtype", "json_model_override_args", "preferred_sampling_params", "enable_deterministic_inference",
    "weight_version",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a server is, and how it is asked.

    Args:
        url: Its address, such as "http://127.0.0.1:8000", with or without "/v1".
        model: Name of the model to ask; needed where the server has several.
        timeout: Seconds that it may be silent within a request.
        key: Name of the environment variable that holds its API key; None for none.
    """

    url: str
    model: str | None = None
    timeout: float = 600.0
    key: str | None = None


@dataclass(frozen=True, kw_only=True)
class Server:
    """What a server says of itself.

    Args:
        kind: Its engine, "vllm" or "sglang".
        version: Its version.
        name: The name that requests give for the model.
        serves: Where the server has the model from: a folder, or a name on a hub; "" where it does not say.
        dtype: Its compute dtype; None where it does not say.
        longest: Most tokens of prompt and response; None where it does not say.
        settings: Other settings that it says, by its own names.
        client: For requests.
        adapter: Whether the name is that of an adapter.
        info: The whole of its report; empty where it gives none.
    """

    kind: str
    version: str
    name: str
    serves: str
    dtype: str | None
    longest: int | None
    settings: Mapping[str, Any]
    client: Client
    adapter: bool = False
    info: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def notes(self, model: str) -> tuple[str, ...]:
        """Return sentences on what the server says, and does not say.

        Args:
            model: Checkpoint that the trainer holds.
        """
        said = [f"{key} {value}" for key, value in self.settings.items() if value not in UNSAID]
        found = [f"the server is {NAMED[self.kind]} {self.version}" + (f", with {', '.join(said)}" if said else "")]
        if not PEERS[self.kind].accepts(self.version):
            found.append(
                f"this release was held to {NAMED[self.kind]} {PEERS[self.kind].supports}, not to {self.version}"
            )
        if self.dtype is None:
            found.append("the server does not say its dtype: it is taken to be --dtype")
        if self.serves and os.path.realpath(self.serves) != os.path.realpath(model) and self.serves != model:
            found.append(f"the server says that it serves {self.serves}, and --model is {model}")
        return tuple(found)

    def ensure_fits(self, prompts: Sequence[Sequence[int]], max_tokens: int, sampling: Mapping[str, Any]) -> None:
        """Refuse what the server would refuse, or leave out without a word.

        Raises:
            ConfigError: A prompt with its response is too long, or a sampling setting unknown; names the option.
        """
        allowed, seed = SAMPLING[self.kind], SEEDS[self.kind]
        for key in sampling:
            if key not in allowed:
                raise ConfigError(
                    f"--sampling: {key} is no setting of a request to {NAMED[self.kind]} that the doctor sends; allowed: "
                    f"{', '.join(allowed)}.{suggestion(key, allowed)}"
                )
        if type(sampling.get(seed, 0)) is not int:
            raise ConfigError(f"--sampling: {seed}={sampling[seed]!r} is not allowed; allowed: an integer.")
        longest = max(map(len, prompts))
        # The response is scored as part of a prompt: vLLM insists on one token more, and SGLang on room for one.
        if self.longest is not None and longest + max_tokens + 1 > self.longest:
            raise ConfigError(
                f"--prompts: the longest prompt has {longest} tokens, with --max-tokens {max_tokens} and one token more than the "
                f"{self.longest} that the server allows; give a smaller --max-tokens, or shorter prompts."
            )


def connect(address: Address) -> Server:
    """Ask a server what it is.

    Args:
        address: Where it is.

    Raises:
        ConfigError: The address is none, no server of vLLM or SGLang listens there, or the model is not told.
        EngineError: The server is not reached.
    """
    key = None if address.key is None else os.environ.get(address.key)
    if address.key is not None and not key:
        raise ConfigError(
            f"--server-key: there is no environment variable {address.key}, or it is empty; put the key into it."
        )
    client = Client(address.url, timeout=address.timeout, key=key)
    listed = (client.get("/v1/models") or {}).get("data")
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    if not entries or not all(isinstance(entry.get("id"), str) for entry in entries):
        raise ConfigError(
            f"--server: {client.url}/v1/models lists no model; give the address of a vLLM or SGLang server."
        )
    entry = _entry(entries, address.model)
    info = client.get("/server_info", config_format="json") or client.get("/get_server_info") or {}
    if isinstance(info.get("model_path"), str) and isinstance(info.get("version"), str):
        return _sglang(client, entry, info)
    version = (client.get("/version") or {}).get("version")
    if not isinstance(version, str):
        raise ConfigError(
            f"--server: what listens at {client.url} says by neither /version nor /server_info that it is vLLM or SGLang; "
            "give the server's own address, not that of a proxy before it."
        )
    return _vllm(client, entry, info, version)


def _entry(entries: Sequence[Mapping[str, Any]], model: str | None) -> Mapping[str, Any]:
    """Return the entry of the model that is to be asked."""
    names = [str(entry["id"]) for entry in entries]
    if model is not None:
        if model not in names:
            raise ConfigError(
                f"--server-model: the server has no {model!r}; allowed: {', '.join(names)}.{suggestion(model, names)}"
            )
        return entries[names.index(model)]
    # Several names of one model are one; an adapter is another, of which the run has to be told.
    if len({(str(entry.get("root")), str(entry.get("parent"))) for entry in entries}) > 1:
        raise ConfigError(f"--server: it has several models; say which by --server-model: {', '.join(names)}.")
    return entries[0]


def _vllm(client: Client, entry: Mapping[str, Any], info: Mapping[str, Any], version: str) -> Server:
    config = info.get("vllm_config")
    config = config if isinstance(config, dict) else {}
    model, cache = (
        part if isinstance(part := config.get(key), dict) else {} for key in ("model_config", "cache_config")
    )
    settings = {key: model.get(key) for key in ("logprobs_mode", "quantization", "generation_config", "hf_overrides")}
    return Server(
        kind="vllm", version=version, name=str(entry["id"]), serves=_text(entry.get("root")),
        dtype=_dtype(model.get("dtype")), longest=_count(entry.get("max_model_len")),
        settings=settings | {"kv_cache_dtype": cache.get("cache_dtype")}, client=client,
    )  # fmt: skip


def _sglang(client: Client, entry: Mapping[str, Any], info: Mapping[str, Any]) -> Server:
    adapter = entry.get("parent") is not None
    # What the model takes, and what fits into the server's cache.
    limits = [
        _count(entry.get("max_model_len")),
        _count(info.get("context_length")),
        _count(info.get("max_req_input_len")),
    ]
    return Server(
        kind="sglang", version=info["version"], name=str(entry["id"]),
        serves=_text(entry.get("root") if adapter else info["model_path"]), dtype=_dtype(info.get("dtype")),
        longest=min((limit for limit in limits if limit is not None), default=None),
        settings={key: info.get(key) for key in REPORTED}, client=client, adapter=adapter, info=info,
    )  # fmt: skip


def _dtype(value: Any) -> str | None:
    """Return a compute dtype that a server says; "auto" says none."""
    found = spelled(value.removeprefix("torch.")) if isinstance(value, str) else ""
    return found if found in NAMES else None


def _count(value: Any) -> int | None:
    return int(value) if isinstance(value, int) and value > 0 else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else brief(value)
