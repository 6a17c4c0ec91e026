"""Part A: weights that one process shards alone, on one GPU. The collectives of NCCL, FSDP with
compiled layers, and the thread that saves shards run as with several GPUs.

python -m benchmarks.gpu.sharded FOLDER prints the figures.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from benchmarks.gpu.correctness import (
    GROUPED,
    GROUPED_SMALL,
    long_batch,
    policy_of,
    relative_distance,
    rms,
    slopes,
)
from benchmarks.gpu.results import run_process
from valence.distributed import sharded_checkpoint
from valence.distributed.fsdp2 import shard
from valence.distributed.process_group import ProcessGroup
from valence.models.compiling import compile_layers
from valence.models.policy_model import PolicyModel
from valence.models.shape import decoder_layers
from valence.training import checkpoints, state_files

DEADLINE = 60.0


def compare_sharded(folder: Path, log: Path) -> dict[str, Any]:
    """Compare sharded weights with whole ones, in a new process.

    logp_rms: root mean square of the differences of log-probabilities (nats). grad: difference of
    the gradient relative to its norm. unequal_saved: number of tensors of a checkpoint, written
    while weights changed, that are not those of before.
    """
    output = run_process([sys.executable, "-m", "benchmarks.gpu.sharded", str(folder)], log)
    return json.loads(output.splitlines()[-1])


def _values_and_gradients(policy: PolicyModel) -> tuple[Tensor, dict[str, Tensor]]:
    vocabulary = policy.causal.config.vocab_size
    batch = long_batch(vocabulary, policy.device)
    logp = policy(batch).logp
    (logp * slopes(batch).to(policy.device)).sum().backward()
    grads = {name: _full(p.grad) for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    return logp[batch.loss_mask].detach().float().cpu(), grads


def _full(tensor: Tensor) -> Tensor:
    """Return a copy of all of a tensor in the memory of the host."""
    full: Tensor = tensor.full_tensor() if state_files.is_sharded(tensor) else tensor  # type: ignore[operator]
    return full.detach().to("cpu", copy=True)


def _num_unequal_saved(policy: PolicyModel, folder: Path, group: ProcessGroup) -> int:
    """Save in a thread while the weights change. Return how many tensors differ from before."""
    checkpoints.MIN_BACKGROUND_BYTES = 0
    files = checkpoints.Checkpoints(
        folder,
        keep=1,
        write=lambda path, tensors, _: sharded_checkpoint.write(path, tensors, group.background),
    )
    weights = dict(policy.named_parameters())
    before = {name: _full(weight) for name, weight in weights.items()}
    files.save(1, {"weights": weights}, {})
    with torch.no_grad():
        for weight in weights.values():
            weight.add_(1)
    files.wait()
    if messages := files.take_messages():
        raise RuntimeError("; ".join(messages))
    saved = state_files.load(files.path(1), sharded_checkpoint.read, lazy=("weights",))["weights"]
    return sum(not torch.equal(saved[name].load(), value) for name, value in before.items())


def main() -> None:
    folder = Path(sys.argv[1])
    on_gpu = torch.cuda.is_available()
    kind = "cuda" if on_gpu else "cpu"
    group = ProcessGroup((HashStore(), HashStore()), 0, 1, 0, DEADLINE, kind)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    policy = policy_of(GROUPED if on_gpu else GROUPED_SMALL, torch.bfloat16, group.device)
    logps, grads = _values_and_gradients(policy)
    shard(policy, decoder_layers(policy.causal), group, compute=policy.compute)
    compiled = on_gpu and compile_layers(policy)
    sharded_logps, sharded_grads = _values_and_gradients(policy)
    figures = {
        "compiled": compiled,
        "num_sharded": sum(state_files.is_sharded(p) for p in policy.parameters()),
        "logp_rms": rms(sharded_logps - logps),
        "grad": relative_distance(sharded_grads, grads),
        "unequal_saved": _num_unequal_saved(policy, folder / "checkpoints", group),
    }
    group.close()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
