"""Train a recipe on a Ray cluster: `python train.py RECIPE WORKERS [KEY=VALUE]...`, with `pip
install "ray[train]"`.

Ray places the workers on one GPU each, and restarts all of them when one fails. The run then
resumes from its last checkpoint. The recipe and its run.dir must be on a disk that all hosts share.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer


class Place(Backend):
    """Tells all workers where rank 0 will listen.

    Ray's own backend would start a group of processes, which Valence does.
    """

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        address, port = worker_group.execute_single(0, free_port)
        worker_group.execute(listens, address, port)


@dataclass
class Environment(TorchConfig):
    @property
    def backend_cls(self) -> type[Backend]:
        return Place


def free_port() -> tuple[str, int]:
    """This host's address, and a port that is free there."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return ray.util.get_node_ip_address(), listener.getsockname()[1]


def listens(address: str, port: int) -> None:
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}


def train(settings: dict[str, Any]) -> None:
    """Train on a worker."""
    context = ray.train.get_context()
    os.environ |= {
        "RANK": str(context.get_world_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": "0",  # Ray makes only one GPU visible to each worker
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
    }
    import valence  # once Ray has said which GPU that is

    valence.train(settings["recipe"], overrides=settings["overrides"])


def main() -> None:
    recipe, workers, *overrides = sys.argv[1:]
    ray.init()
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    TorchTrainer(
        train,
        train_loop_config={"recipe": recipe, "overrides": overrides},
        torch_config=Environment(),
        scaling_config=ray.train.ScalingConfig(num_workers=int(workers), use_gpu=has_gpus),
        run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=3)),
    ).fit()


if __name__ == "__main__":
    main()
