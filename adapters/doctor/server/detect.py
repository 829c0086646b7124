"""Find out which server listens at an address and what it reports of itself, and check that the doctor's requests fit it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mismatch_ext.adapters.doctor.server.client import Client
from mismatch_ext.adapters.http import brief

from mismatch_ext.errors import ConfigError, suggestion
from mismatch_ext.precision.dtypes import NAMES, spelled
from mismatch_ext.versions import PEERS

COMMON = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop_token_ids",
    "ignore_eos", "logit_bias",
)  # fmt: skip
# Request settings by the engine's kind. vLLM's /v1/completions silently ignores unknown settings, and SGLang's /generate refuses
# them.
SAMPLING = {
    "vllm": (*COMMON, "min_tokens", "seed", "allowed_token_ids"),
    "sglang": (*COMMON, "min_new_tokens", "sampling_seed", "stop", "stop_regex", "no_stop_trim"),
}
SEEDS = {"vllm": "seed", "sglang": "sampling_seed"}
"""The name that each engine gives the seed of sampling."""
NAMED = {"vllm": "vLLM", "sglang": "SGLang"}
# Values that servers report for a setting that was not set.
UNSAID: tuple[Any, ...] = (None, "", "auto", "default", {}, "{}", False)
# Settings in SGLang's report that change its numbers or its tokens.
REPORTED = (
    "quantization", "kv_cache_dtype", "json_model_override_args", "preferred_sampling_params", "enable_deterministic_inference",
    "weight_version",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Address:
    """The address of a server, and how to ask it.

    Args:
        url: The server's address, such as "http://127.0.0.1:8000", with or without "/v1".
        model: Name of the model to ask; needed if the server has several.
        timeout: Seconds that the server may be silent within a request.
        key: Name of the environment variable that holds the API key; None sends no key.
    """

    url: str
    model: str | None = None
    timeout: float = 600.0
    key: str | None = None


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server, and what it reports of itself.

    Args:
        kind: The server's engine, "vllm" or "sglang".
        version: The engine's version.
        name: The name of the model in requests.
        serves: Folder or hub name that the server loaded the model from; "" if it does not say.
        dtype: Compute dtype; None if the server does not say.
        longest: Largest number of tokens of prompt and response together; None if the server does not say.
        settings: Other settings that the server reports, by its own names.
        client: Client that sends the requests.
        adapter: Whether `name` is the name of an adapter.
        info: The server's whole report; empty if it gives none.
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
        """Return sentences on what the server reports, and what it does not report.

        Args:
            model: Checkpoint that the trainer holds.
        """
        settings = [f"{key} {value}" for key, value in self.settings.items() if value not in UNSAID]
        notes = [
            f"the server is {NAMED[self.kind]} {self.version}" + (f", with {', '.join(settings)}" if settings else "")
        ]
        peer = PEERS[self.kind]
        if not (peer.accepts(self.version) and peer.tested(self.version)):
            notes.append(
                f"this release was run with {NAMED[self.kind]} {', '.join(peer.ran)}, and nobody has run it with {self.version}"
            )
        if self.kind == "vllm" and self.adapter and adapted_modules(self.serves) is None:
            notes.append(
                f"the adapter's folder {self.serves} cannot be read here: if it changes lm_head, vLLM's scores of prompts leave "
                "that out"
            )
        if self.dtype is None:
            notes.append("the server does not say its dtype: it is taken to be --dtype")
        if self.serves and os.path.realpath(self.serves) != os.path.realpath(model) and self.serves != model:
            notes.append(f"the server says that it serves {self.serves}, and --model is {model}")
        return tuple(notes)

    def ensure_fits(self, prompts: Sequence[Sequence[int]], max_tokens: int, sampling: Mapping[str, Any]) -> None:
        """Refuse requests that the server would refuse, or whose settings it would silently ignore.

        Raises:
            ConfigError: A prompt with its response is too long, or a sampling setting is unknown; names the option.
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
        # The response is later scored as part of a prompt. vLLM then samples one more token, and SGLang needs room for one.
        if self.longest is not None and longest + max_tokens + 1 > self.longest:
            raise ConfigError(
                f"--prompts: the longest prompt has {longest} tokens, with --max-tokens {max_tokens} and one token more than the "
                f"{self.longest} that the server allows; give a smaller --max-tokens, or shorter prompts."
            )


def connect(address: Address) -> Server:
    """Find out which server listens at an address, and read its reports.

    Args:
        address: The server's address, and how to ask it.

    Raises:
        ConfigError: The address is malformed, no vLLM or SGLang server listens there, the API key is missing, or the server has
            several models and none was chosen.
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
    # Several names of one model count as one model; an adapter counts as another, so the user has to choose.
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
    adapter = entry.get("parent") is not None
    if adapter:
        _refuse_adapter_on_head(str(entry["id"]), _text(entry.get("root")))
    return Server(
        kind="vllm", version=version, name=str(entry["id"]), serves=_text(entry.get("root")),
        dtype=_dtype(model.get("dtype")), longest=_count(entry.get("max_model_len")),
        settings=settings | {"kv_cache_dtype": cache.get("cache_dtype")}, client=client, adapter=adapter,
    )  # fmt: skip


def _refuse_adapter_on_head(name: str, folder: str) -> None:
    """Refuse an adapter of vLLM's on the output head, if its folder can be read here; another one's is noted."""
    changed = adapted_modules(folder)
    if changed is not None and "lm_head" in changed:
        raise ConfigError(
            f"--server: the adapter {name} changes the output head (lm_head), and vLLM's scores of prompts leave that out, as if "
            "they were of another model. Serve the merged weights, or give --rollouts."
        )


def adapted_modules(folder: str) -> tuple[str, ...] | None:
    """Return the last parts of the names of the modules that an adapter changes; None if its configuration cannot be read."""
    try:
        config = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    named = [config.get(key) for key in ("target_modules", "modules_to_save")]
    lists = [[names] if isinstance(names, str) else names or [] for names in named]
    return tuple(str(name).rpartition(".")[2] for names in lists for name in names)


def _sglang(client: Client, entry: Mapping[str, Any], info: Mapping[str, Any]) -> Server:
    adapter = entry.get("parent") is not None
    # The first two are limits of the model, and the third is what fits into the server's cache.
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
    """Return the compute dtype that a server reports; None for anything that is not a dtype, such as "auto"."""
    name = spelled(value.removeprefix("torch.")) if isinstance(value, str) else ""
    return name if name in NAMES else None


def _count(value: Any) -> int | None:
    return int(value) if isinstance(value, int) and value > 0 else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else brief(value)
