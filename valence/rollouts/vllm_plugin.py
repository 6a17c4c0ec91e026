"""What a vLLM server loads so that weights reach it without a GPU: the transports ``disk`` and
``gloo``.

vLLM finds it as an entry point of the group ``vllm.general_plugins``. It imports nothing of
Valence, so that the one file, put on a server's path, is enough. The trainer's side of both is in
``transports.py``.

Both load a whole new model layer by layer, as vLLM's own NCCL transport does, and mend what that
leaves behind on a CPU: an output head that shares its weights with the embeddings keeps a packed
copy of its own, of the old weights.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

NAMES = ("disk", "gloo")


def register() -> None:
    """Adds the transports to vLLM's table; a second call changes nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # type: ignore[import-not-found]

    for name in NAMES:
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory._registry[name] = lambda name=name: engines()[name]


def own_address(peer: str) -> str:
    """The address under which this machine is known on the way to ``peer``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # sends nothing
        return probe.getsockname()[0]


def free(host: str) -> int:
    """A port of this address that nobody listens on."""
    with socket.socket() as taken:
        taken.bind((host, 0))
        return taken.getsockname()[1]


def join(host: str, port: int, rank: int, size: int, seconds: float, *, serve: bool) -> Any:
    """A gloo group of ``size`` processes that meet at host:port, beside whatever other groups a
    process has.
    """
    import torch

    dist: Any = torch.distributed  # pyright knows only a part of its names
    patience = timedelta(seconds=seconds)
    store = dist.TCPStore(host, port, is_master=serve, timeout=patience, wait_for_workers=False)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = patience
    options._devices = [
        dist.ProcessGroupGloo.create_device(hostname=host if serve else own_address(host))
    ]
    return dist.ProcessGroupGloo(dist.PrefixStore("weights", store), rank, size, options)  # pyright: ignore


def layout(dtypes: list[str], shapes: list[list[int]]) -> list[tuple[Any, int, int]]:
    """dtype, first byte and number of bytes of each of several tensors that travel as one row of
    bytes, aligned to 16.
    """
    import torch

    out, at = [], 0
    for name, shape in zip(dtypes, shapes, strict=True):
        dtype = getattr(torch, name)
        size = torch.Size(shape).numel() * dtype.itemsize
        out.append((dtype, at, size))
        at += -(-size // 16) * 16
    return out


@cache
def reloading() -> type:
    """What both transports do inside a vLLM worker: all but how weights arrive."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine  # type: ignore[import-not-found]

    class Reload(WeightTransferEngine):
        """Loads a whole new model, layer by layer."""

        def start_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload  # type: ignore[import-not-found]

            abandon(self.model)
            # Before the reload takes tied weights apart.
            self.missing: set[str] | None = {name for name, _ in self.model.named_parameters()}
            initialize_layerwise_reload(self.model)

        def load(self, weights: Iterable[tuple[str, Any]], *, last: bool) -> None:
            loaded = self.model.load_weights(weights)
            if loaded is None:
                self.missing = None  # this model does not tell
            elif self.missing is not None:
                self.missing -= loaded
            # Said here and not when all is finished: a worker stays in its update when finishing
            # fails.
            if last and self.missing and self.model_config.quantization is None:
                raise RuntimeError(f"the new weights lack {', '.join(sorted(self.missing)[:8])}")

        def finish_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload  # type: ignore[import-not-found]

            finalize_layerwise_reload(self.model, self.model_config)
            pack_heads(self.model)

        def init_transfer_engine(self, init_info: Any) -> None:
            pass

        def receive_weights(self, update_info: Any) -> None:
            done = False
            try:
                self.receive(update_info)
                done = True
            finally:
                if not done:
                    abandon(self.model)  # a server whose update failed must still answer something

        def receive(self, update_info: Any) -> None:
            raise NotImplementedError

        def shutdown(self) -> None:
            pass

    return Reload


@cache
def messages() -> tuple[type, ...]:
    """What a trainer tells a worker: at the start and with each update, of disk and of gloo."""
    from vllm.distributed.weight_transfer import base  # type: ignore[import-not-found]

    @dataclass
    class DiskInit(base.WeightTransferInitInfo):
        """Nothing needs to be agreed on."""

    @dataclass
    class DiskUpdate(base.WeightTransferUpdateInfo):
        folder: str
        """Of safetensors files, on a disk that this server sees."""

    @dataclass
    class GlooInit(base.WeightTransferInitInfo):
        host: str
        port: int
        world_size: int
        seconds: float
        rank_offset: int = 1

    @dataclass
    class GlooUpdate(base.WeightTransferUpdateInfo):
        names: list[str]
        dtypes: list[str]
        shapes: list[list[int]]
        last: bool

    return DiskInit, DiskUpdate, GlooInit, GlooUpdate


@cache
def engines() -> dict[str, type]:
    """Transport -> the class that receives weights inside a vLLM worker."""
    import torch

    DiskInit, DiskUpdate, GlooInit, GlooUpdate = messages()
    Reload: Any = reloading()

    class DiskReceiver(Reload):
        init_info_cls, update_info_cls = DiskInit, DiskUpdate

        def receive(self, update_info: Any) -> None:
            self.load(read(Path(update_info.folder)), last=True)

    class GlooReceiver(Reload):
        init_info_cls, update_info_cls = GlooInit, GlooUpdate
        group: Any = None

        def init_transfer_engine(self, init_info: Any) -> None:
            parallel = self.parallel_config
            rank = (
                init_info.rank_offset
                + parallel.data_parallel_index * parallel.world_size
                + parallel.rank
            )
            self.group = join(
                init_info.host,
                init_info.port,
                rank,
                init_info.world_size,
                init_info.seconds,
                serve=False,
            )

        def receive(self, update_info: Any) -> None:
            if self.group is None:
                raise RuntimeError("weights arrive before a group was made for them")
            parts = layout(update_info.dtypes, update_info.shapes)
            row = torch.empty(sum(-(-size // 16) * 16 for _, _, size in parts), dtype=torch.uint8)
            self.group.broadcast(row, root=0).wait()
            named = zip(update_info.names, update_info.shapes, parts, strict=True)
            # A copy of each: a layer keeps what it was given until the layer is complete.
            tensors = (
                (name, row[at : at + size].view(dtype).view(shape).clone().to(self.device))
                for name, shape, (dtype, at, size) in named
            )
            self.load(tensors, last=update_info.last)

        def shutdown(self) -> None:
            self.group = None

    return {"disk": DiskReceiver, "gloo": GlooReceiver}


def read(folder: Path) -> Iterator[tuple[str, Any]]:
    """The tensors of all safetensors files of a folder."""
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no safetensors files that this server can see")
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                yield name, tensors.get_tensor(name)


def abandon(model: Any) -> None:
    """Ends an update that failed half-way: layers that still wait for weights get their old ones
    back.

    Without it the next update would count weights of the failed one as its own.
    """
    from vllm.model_executor.model_loader.reload import layerwise  # type: ignore[import-not-found]

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
            info.reset()


def pack_heads(model: Any) -> None:
    """Packs output heads again, which on a CPU are copies of weights: one that is tied to the
    embeddings loads none itself.
    """
    from vllm.model_executor.layers import vocab_parallel_embedding as embeddings  # type: ignore[import-not-found]

    for layer in model.modules():
        plain = isinstance(
            getattr(layer, "quant_method", None), embeddings.UnquantizedEmbeddingMethod
        )
        if (
            plain
            and isinstance(layer, embeddings.ParallelLMHead)
            and layer.weight.device.type == "cpu"
        ):
            layer.quant_method.process_weights_after_loading(layer)
