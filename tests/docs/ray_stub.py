"""Ray, as far as a script for it uses it: workers are processes of this host.

`python -m tests.docs.ray_stub SCRIPT [WORD]...`
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

RESOURCES = {"CPU": 2.0}


@dataclass
class TorchConfig:
    """What a script derives its own from."""


class Group:
    """Workers before they are forked: what is done on all of them is done here, and they inherit
    it.
    """

    def execute_single(self, worker: int, call: Any, *args: Any) -> Any:
        return call(*args)

    def execute(self, call: Any, *args: Any) -> None:
        call(*args)


class Trainer:
    """Ray's TorchTrainer: calls the loop in each worker. Raises AssertionError where one fails."""

    def __init__(
        self,
        loop: Any,
        *,
        train_loop_config: Any,
        torch_config: Any,
        scaling_config: Any,
        run_config: Any,
    ) -> None:
        assert scaling_config.use_gpu is ("GPU" in RESOURCES)
        self.loop, self.loop_config, self.config, self.workers = (
            loop,
            train_loop_config,
            torch_config,
            scaling_config.num_workers,
        )

    def fit(self) -> None:
        self.config.backend_cls().on_start(Group(), self.config)
        importlib.import_module("valence.api")  # once, not in each worker
        context = multiprocessing.get_context("fork")
        workers = [context.Process(target=self._work, args=(rank,)) for rank in range(self.workers)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert [worker.exitcode for worker in workers] == [0] * self.workers

    def _work(self, rank: int) -> None:
        vars(sys.modules["ray.train"])["get_context"] = lambda: SimpleNamespace(
            get_world_rank=lambda: rank,
            get_world_size=lambda: self.workers,
            get_local_world_size=lambda: self.workers,
        )
        self.loop(self.loop_config)
        assert os.environ["LOCAL_RANK"] == "0", "a worker sees its own GPU alone"


def main() -> None:
    names = ("ray", "ray.util", "ray.train", "ray.train.backend", "ray.train.torch")
    sys.modules |= {name: ModuleType(name) for name in names}
    ray, util, train, backend, torch = (vars(sys.modules[name]) for name in names)
    ray |= {"init": lambda: None, "cluster_resources": lambda: RESOURCES}
    ray |= {"train": sys.modules["ray.train"], "util": sys.modules["ray.util"]}
    util["get_node_ip_address"] = lambda: "127.0.0.1"
    train |= dict.fromkeys(["ScalingConfig", "RunConfig", "FailureConfig"], SimpleNamespace)
    backend["Backend"] = object
    torch |= {"TorchConfig": TorchConfig, "TorchTrainer": Trainer}
    script, *sys.argv[1:] = sys.argv[1:]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
