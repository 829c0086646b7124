"""Write the files of this folder by the hosts' own functions: `python -m tests.data.rollouts.write HOST FOLDER`; see README.md.

FOLDER holds the host's source; what the function does not need of what its modules import may be missing.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.abc
import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

HERE = Path(__file__).parent


class Anything(type):
    """Makes classes of which every attribute is one, too."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands for packages that a host's modules import and its writer does not use; whatever they hold is a class."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self._names else None
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = lambda name: getattr(Anything("Anything", (), {}), name)  # type: ignore[method-assign]
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""


def rows() -> list[dict[str, Any]]:
    """Return the responses of own.jsonl, which vLLM sampled, with their routes as the engine gave them."""
    from mismatch_ext.doctor import read_rollouts

    found = []
    for response in read_rollouts(HERE / "own.jsonl").responses:
        assert response.routes is not None
        found.append(
            {
                "prompt": list(response.prompt_ids),
                "response": list(response.response_ids),
                "logprobs": list(response.logprobs),
                "routes": torch.from_numpy(response.routes.experts.copy()).int(),
            }
        )
    return found


def slime() -> None:
    """Write as slime's rollout manager does; the last sample was aborted before a token."""
    from slime.observability.rollout_data_utils import save_debug_rollout_data  # type: ignore[import-not-found]
    from slime.utils.types import Sample  # type: ignore[import-not-found]

    samples = []
    for number, row in enumerate(rows()):
        sample = Sample(index=number, tokens=list(row["prompt"]), reward=1.0)
        rows_, layers, top_k = row["routes"].shape
        meta = {
            "routed_experts": row["routes"].flatten(),
            "weight_version": "3",
            "finish_reason": {"type": "stop"},
        }
        args = SimpleNamespace(num_layers=layers, moe_router_topk=top_k)
        assert rows_ == len(row["prompt"]) + len(row["response"]) - 1
        sample.append_response_tokens(args, tokens=row["response"], log_probs=row["logprobs"], meta_info=meta)
        samples.append(sample)
    aborted = Sample(index=len(samples), tokens=[])
    aborted.status = Sample.Status.ABORTED
    save_debug_rollout_data(str(HERE / "slime_{rollout_id}.pt"), [*samples, aborted], rollout_id=0, evaluation=False)


def nemo_rl() -> None:
    """Write as NeMo-RL's grpo_train does: batches padded on the right, a prompt of two messages."""
    sys.meta_path.append(Missing("mlflow", "swanlab", "wandb", "matplotlib", "ray", "prometheus_client"))
    from nemo_rl.utils.logger import Logger  # type: ignore[import-not-found]

    found = rows()
    lengths = torch.tensor([len(row["prompt"]) + len(row["response"]) for row in found])
    shape = len(found), int(lengths.max())
    tokens, mask, logprobs = torch.zeros(shape, dtype=torch.long), torch.zeros(shape), torch.zeros(shape)
    for at, row in enumerate(found):
        first, last = len(row["prompt"]), int(lengths[at])
        tokens[at, :last] = torch.tensor([*row["prompt"], *row["response"]])
        mask[at, first:last] = 1
        logprobs[at, first:last] = torch.tensor(row["logprobs"])
    logged = {
        "content": [["1+1=", "2"] for _ in found],
        "rewards": [1.0] * len(found),
        "input_lengths": lengths.tolist(),
        "token_ids": tokens.tolist(),
        "token_loss_mask": mask.long().tolist(),
        "sample_loss_mask": [1.0] * len(found),
        "advantages": torch.zeros(shape).tolist(),
        "generation_logprobs": logprobs.tolist(),
        "prev_logprobs": logprobs.tolist(),
    }
    logger = Logger.__new__(Logger)
    logger.base_log_dir, logger.gpu_monitor, logger.loggers = str(HERE), None, []
    logger.log_batched_dict_as_jsonl(logged, "nemo_rl_train_data_step1.jsonl")


def prime_rl() -> None:
    """Write as prime-rl's orchestrator does: an episode a response, two turns in the first, and a judge that is not trained."""
    sys.meta_path.append(Missing("prime_cli", "wandb", "wandb_workspaces", "wandb_gql"))
    import verifiers.v1 as vf  # type: ignore[import-not-found]
    from prime_rl.monitors.file import FileMonitor  # type: ignore[import-not-found]
    from verifiers.v1.graph import MessageNode  # type: ignore[import-not-found]

    task = {"type": "Sum", "data": {"idx": 0, "prompt": "1+1="}}
    config = {"harness": {"id": "bash"}, "model": "policy"}
    wire = importlib.import_module("verifiers.v1.episode").WireEpisode

    def trace(nodes: list[dict[str, Any]], name: str = "agent", trainable: bool = True) -> dict[str, Any]:
        last = max((at for at, node in enumerate(nodes) if node.get("sampled")), default=None)
        call = {"node": last, "model": name, "sampling": {"temperature": 1.0}, "finish_reason": "stop"}
        agent = {"config": config, "name": name, "trainable": trainable}
        return {"task": task, "agent": agent, "nodes": nodes, "calls": [call], "ok": True, "is_completed": True}

    def asked(ids: list[int]) -> dict[str, Any]:
        message = {"role": "user", "content": "1+1="}
        return {"message": message, "token_ids": ids, "mask": [False] * len(ids)}

    def answered(parent: int, scaffold: list[int], ids: list[int], logprobs: list[float]) -> dict[str, Any]:
        return {
            "parent": parent,
            "message": {"role": "assistant", "content": "2"},
            "sampled": True,
            "token_ids": [*scaffold, *ids],
            "mask": [False] * len(scaffold) + [True] * len(ids),
            "logprobs": logprobs,
        }

    episodes = []
    for number, row in enumerate(rows()):
        nodes = [asked(row["prompt"][:-1]), answered(0, row["prompt"][-1:], row["response"], row["logprobs"])]
        if number == 0:
            # A second branch from the same answer, whose context it is, and a branch from the question.
            nodes += [asked([5, 6]) | {"parent": 1}, answered(2, [], [7, 1], [-0.5, -0.25])]
            nodes += [asked([8]) | {"parent": 1}, answered(4, [], [9], [-0.125])]
        episode = wire.model_validate(
            {
                "env": {"id": "sum"},
                "task": task,
                "run": {
                    "type": "train",
                    "id": "r",
                    "work": {"type": "train", "step": 1, "policy": {"start": 2, "end": 2}},
                },
                "ok": True,
                "traces": [trace(nodes), trace([asked([3]), answered(0, [], [4], [-9.0])], "judge", False)][
                    : 1 + (number == 1)
                ],
            }
        )
        assert all(isinstance(node, MessageNode) for one in episode.traces for node in one.nodes) and isinstance(
            episode, vf.Episode
        )
        episodes.append(episode)
    monitor = FileMonitor.__new__(FileMonitor)
    monitor.output_dir = HERE / "prime_rl"
    asyncio.run(monitor.log_episodes(episodes, step=1, kind="train", subset="effective"))
    written = HERE / "prime_rl/rollouts/step_1/train/effective/traces.jsonl"
    written.rename(HERE / "prime_rl_traces.jsonl")
    for folder in written.relative_to(HERE).parents[:-1]:
        (HERE / folder).rmdir()


if __name__ == "__main__":
    sys.path[:0] = sys.argv[2:]
    {"slime": slime, "nemo_rl": nemo_rl, "prime_rl": prime_rl}[sys.argv[1]]()
