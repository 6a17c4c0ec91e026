"""vLLM plugin that receives weights without a GPU: the transports ``disk`` and ``gloo``.

vLLM finds it as an entry point of the group ``vllm.general_plugins``. It imports nothing of
Valence, so that this one file on a server's path is enough. The trainer's side is in
``transports.py``.

Both transports reload a whole model layer by layer, as vLLM's own NCCL transport does. On a CPU
they also repack an output head that shares its weights with the embeddings, which otherwise keeps a
packed copy of the old weights.
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
    """Add the transports to vLLM's table, once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # type: ignore[import-not-found]

    for name in NAMES:
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory._registry[name] = lambda name=name: engines()[name]


def local_address(peer: str) -> str:
    """The address of this machine on the route to ``peer``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # sends nothing
        return probe.getsockname()[0]


def free_port(host: str) -> int:
    """A port of this address that is not in use."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def join(host: str, port: int, rank: int, size: int, seconds: float, *, serve: bool) -> Any:
    """A gloo group of ``size`` processes that meet at host:port, independent of other groups."""
    import torch

    dist: Any = torch.distributed  # pyright knows only some of its names
    timeout = timedelta(seconds=seconds)
    store = dist.TCPStore(host, port, is_master=serve, timeout=timeout, wait_for_workers=False)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [
        dist.ProcessGroupGloo.create_device(hostname=host if serve else local_address(host))
    ]
    return dist.ProcessGroupGloo(dist.PrefixStore("weights", store), rank, size, options)  # pyright: ignore


def layout(dtypes: list[str], shapes: list[list[int]]) -> list[tuple[Any, int, int]]:
    """dtype, offset and size in bytes of each tensor in one buffer, aligned to 16 bytes."""
    import torch

    parts, offset = [], 0
    for name, shape in zip(dtypes, shapes, strict=True):
        dtype = getattr(torch, name)
        size = torch.Size(shape).numel() * dtype.itemsize
        parts.append((dtype, offset, size))
        offset += -(-size // 16) * 16
    return parts


@cache
def reload_engine() -> type:
    """Base class of both transports in a vLLM worker: everything except receiving tensors."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine  # type: ignore[import-not-found]

    class Reload(WeightTransferEngine):
        """Reloads a whole model layer by layer."""

        def start_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload  # type: ignore[import-not-found]

            abandon(self.model)
            # before the reload separates tied weights
            self.missing: set[str] | None = {name for name, _ in self.model.named_parameters()}
            initialize_layerwise_reload(self.model)

        def load(self, weights: Iterable[tuple[str, Any]], *, last: bool) -> None:
            loaded = self.model.load_weights(weights)
            if loaded is None:
                self.missing = None  # this model does not report them
            elif self.missing is not None:
                self.missing -= loaded
            # checked here and not in finish_weight_update, whose failure leaves the worker updating
            if last and self.missing and self.model_config.quantization is None:
                raise RuntimeError(f"the new weights lack {', '.join(sorted(self.missing)[:8])}")

        def finish_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload  # type: ignore[import-not-found]

            finalize_layerwise_reload(self.model, self.model_config)
            pack_heads(self.model)

        def init_transfer_engine(self, init_info: Any) -> None:
            pass

        def receive_weights(self, update_info: Any) -> None:
            is_complete = False
            try:
                self.receive(update_info)
                is_complete = True
            finally:
                if not is_complete:
                    abandon(self.model)  # the server must keep answering

        def receive(self, update_info: Any) -> None:
            raise NotImplementedError

        def shutdown(self) -> None:
            pass

    return Reload


@cache
def messages() -> tuple[type, ...]:
    """Messages of the trainer, for disk and gloo: at the start, and with each update."""
    from vllm.distributed.weight_transfer import base  # type: ignore[import-not-found]

    @dataclass
    class DiskInit(base.WeightTransferInitInfo):
        """Empty."""

    @dataclass
    class DiskUpdate(base.WeightTransferUpdateInfo):
        folder: str
        """Folder of safetensors files that this server can read."""

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
    """The class of each transport that receives weights in a vLLM worker."""
    import torch

    DiskInit, DiskUpdate, GlooInit, GlooUpdate = messages()
    Reload: Any = reload_engine()

    class DiskReceiver(Reload):
        init_info_cls, update_info_cls = DiskInit, DiskUpdate

        def receive(self, update_info: Any) -> None:
            self.load(read_tensors(Path(update_info.folder)), last=True)

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
                raise RuntimeError("weights arrived before the group was initialized")
            parts = layout(update_info.dtypes, update_info.shapes)
            buffer = torch.empty(
                sum(-(-size // 16) * 16 for _, _, size in parts), dtype=torch.uint8
            )
            self.group.broadcast(buffer, root=0).wait()
            named = zip(update_info.names, update_info.shapes, parts, strict=True)
            # copies, because a layer keeps its tensors until it is complete
            tensors = (
                (
                    name,
                    buffer[offset : offset + size].view(dtype).view(shape).clone().to(self.device),
                )
                for name, shape, (dtype, offset, size) in named
            )
            self.load(tensors, last=update_info.last)

        def shutdown(self) -> None:
            self.group = None

    return {"disk": DiskReceiver, "gloo": GlooReceiver}


def read_tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """The tensors of all safetensors files of a folder."""
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} has no safetensors files that this server can read")
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                yield name, tensors.get_tensor(name)


def abandon(model: Any) -> None:
    """Undo a partial update: restore the old weights of layers that wait for new ones.

    Otherwise the next update would include weights of the failed one.
    """
    from vllm.model_executor.model_loader.reload import layerwise  # type: ignore[import-not-found]

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
            info.reset()


def pack_heads(model: Any) -> None:
    """Repack output heads, which on a CPU are copies: a tied head loads no weights itself."""
    from vllm.model_executor.layers import vocab_parallel_embedding as embeddings  # type: ignore[import-not-found]

    for layer in model.modules():
        is_unquantized = isinstance(
            getattr(layer, "quant_method", None), embeddings.UnquantizedEmbeddingMethod
        )
        if (
            is_unquantized
            and isinstance(layer, embeddings.ParallelLMHead)
            and layer.weight.device.type == "cpu"
        ):
            layer.quant_method.process_weights_after_loading(layer)
