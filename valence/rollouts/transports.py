"""Sending new weights to a vLLM server while it serves.

Full weights: ``/pause`` (freezes requests, drops caches), ``/init_weight_transfer_engine`` once,
``/start_weight_update``, ``/update_weights``, ``/finish_weight_update`` with the version's label,
``/resume``. On the server, the plugin in ``vllm_plugin.py`` receives ``disk`` and ``gloo``, and
vLLM itself ``nccl`` and ``ipc``. Adapters (``lora``): a folder per version, loaded with its label
as name.
"""

from __future__ import annotations

import base64
import os
import pickle
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor

from valence.errors import UserError
from valence.files import refuse_links
from valence.rollouts.client import RequestRefused, ServerClient, ServerLost
from valence.rollouts.protocol import Named
from valence.rollouts.vllm_plugin import free_port, join, layout, local_address

SHARD = 2**30
"""Maximum bytes of weights per file or broadcast."""

STAGED = 2**28
"""Bytes of a buffer on the device of a server, which it needs twice; more for a larger tensor."""

PREFIX = "valence"
"""Prefix of the labels of weights that Valence sends."""

FAILED = f"{PREFIX}-failed"
"""Label of weights after an incomplete update."""

CLEANUP_SECONDS = 5.0
"""Time limit of each request that cleans up after an error."""

Adapter = Callable[[Path], None]


class WeightTransfer(Protocol):
    """Sends weights to servers, and keeps the newest ones to send them again to a server that lost
    them.

    is_stored: the servers read the weights from a disk, all at the same time.
    """

    is_stored: bool

    def keep(self, label: str, weights: Callable[[], Named], adapter: Adapter | None) -> None:
        """Keep the weights of a version."""
        ...

    def send(self, client: ServerClient, label: str) -> None:
        """Send the weights that are kept."""
        ...

    def remove_old(self) -> None:
        """Remove the weights that no server needs once the newest ones were sent."""
        ...

    def server_label(self, client: ServerClient) -> str:
        """The label of the server's weights; a label that was never kept if they are not ours."""
        ...

    def model_name(self, label: str) -> str | None:
        """The model that requests name to use these weights."""
        ...

    def close(self, clients: Sequence[ServerClient]) -> None:
        """Remove folders and leave groups."""
        ...


class FullWeightTransfer:
    """All weights of a model: common part of disk, gloo and nccl.

    sent_labels: of the weights that each server received last, by its address.
    """

    backend: str
    is_stored = False

    def __init__(self) -> None:
        self.sent_labels: dict[str, str] = {}

    def keep(self, label: str, weights: Callable[[], Named], adapter: Adapter | None) -> None:
        raise NotImplementedError

    def connect(self, client: ServerClient) -> None:
        """Join a group with the server, if necessary."""
        raise NotImplementedError

    def disconnect(self, client: ServerClient) -> None:
        """Leave the group."""
        raise NotImplementedError

    def transfer(self, client: ServerClient) -> None:
        """Send the weights between start and finish."""
        raise NotImplementedError

    def server_label(self, client: ServerClient) -> str:
        return str(client.get("/weight_info")["weight_version"])

    def model_name(self, label: str) -> str | None:
        return None

    def send(self, client: ServerClient, label: str) -> None:
        # else the server was restarted
        if self.server_label(client) != self.sent_labels.pop(client.url, ""):
            self.disconnect(client)
        try:
            client.send("/pause?mode=keep&clear_cache=true")
            self.connect(client)
            start_update(client)
            self.transfer(client)
            client.send("/finish_weight_update", {"weight_version": label})
            client.send("/resume")
            self.sent_labels[client.url] = label
        except RequestRefused as error:
            raise UserError(
                f"the server did not accept the new weights: {error.message}",
                code="rollout-weights-refused",
                where=error.where,
                fix="install Valence's plugin for vLLM (`valence docs vllm`) and start the server "
                f'with --weight-transfer-config \'{{"backend": "{self.backend}"}}\'; if it still '
                f"refuses, read its log",
            ) from error
        finally:
            if client.url not in self.sent_labels:
                self.disconnect(client)
                abort_update(client)

    def remove_old(self) -> None:
        pass

    def close(self, clients: Sequence[ServerClient]) -> None:
        for client in clients:
            self.disconnect(client)


def start_update(client: ServerClient) -> None:
    """Start an update; end one that another trainer left open."""
    try:
        client.send("/start_weight_update")
    except RequestRefused as error:
        if "already active" not in error.message:
            raise
        with suppress(RequestRefused):
            client.send("/update_weights", {"update_info": {}})  # a failed update is closed
        client.send("/start_weight_update")


def abort_update(client: ServerClient) -> None:
    """After a failed update: invalidate the label of the weights, and end waiting requests."""
    for path, body in (
        ("/update_weight_version", {"new_version": FAILED}),
        ("/abort_requests", {}),
        ("/resume", None),
    ):
        with suppress(ServerLost, UserError):  # the error of the update is raised
            client.send(path, body, seconds=CLEANUP_SECONDS)


class DiskTransfer(FullWeightTransfer):
    """A folder of safetensors files per version, on a disk shared by trainer and server."""

    backend, is_stored = "disk", True

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.current = empty_folder(folder), Path()

    def keep(self, label: str, weights: Callable[[], Named], adapter: Adapter | None) -> None:
        from safetensors.torch import save_file

        target = self.folder / label
        target.mkdir(parents=True)
        for number, shard in enumerate(shards(weights(), SHARD)):
            save_file(
                {name: tensor.cpu() for name, tensor in shard},
                target / f"model-{number:05}.safetensors",
            )
        if self.current != Path():
            shutil.rmtree(self.current, ignore_errors=True)
        self.current = target

    def connect(self, client: ServerClient) -> None:
        pass

    def disconnect(self, client: ServerClient) -> None:
        pass

    def transfer(self, client: ServerClient) -> None:
        client.send("/update_weights", {"update_info": {"folder": str(self.current)}})

    def close(self, clients: Sequence[ServerClient]) -> None:
        if self.current != Path():
            shutil.rmtree(self.current, ignore_errors=True)


class StreamedWeightTransfer(FullWeightTransfer):
    """Weights that are sent tensor by tensor: common part of gloo, nccl and ipc.

    copies: copy every version to this host's memory, because the policy is trained while the server
    samples. Otherwise the policy's weights themselves are sent, again if the server lost them.
    groups: the connection to each server, by its address.
    """

    def __init__(self, timeout: float, *, copies: bool = True) -> None:
        super().__init__()
        self.timeout, self.copies = timeout, copies
        self.groups: dict[str, Any] = {}
        self.weights: Callable[[], Named] = tuple

    def keep(self, label: str, weights: Callable[[], Named], adapter: Adapter | None) -> None:
        self.weights = weights
        if self.copies:
            host_copies = [(name, host_copy(tensor)) for name, tensor in weights()]
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the copies are complete
            self.weights = host_copies.copy

    def disconnect(self, client: ServerClient) -> None:
        self.groups.pop(client.url, None)

    def send_while(
        self, client: ServerClient, path: str, body: object, work: Callable[[], None]
    ) -> None:
        """Post while ``work`` does this side's part.

        Stops waiting when either fails, and after the time limit.
        """
        futures = [in_background(lambda: client.send(path, body)), in_background(work)]
        deadline = time.monotonic() + self.timeout
        while not all(future.done() for future in futures):
            for future in futures:
                if future.done():
                    future.result()
            if time.monotonic() > deadline:
                raise client.timeout_error(path, self.timeout)
            time.sleep(0.0005)
        for future in futures:
            future.result()

    def transfer(self, client: ServerClient) -> None:
        for batch, is_last in mark_last(shards(self.weights(), SHARD)):
            info = describe(batch, DTYPES[self.backend])
            if self.backend == "gloo":
                info["last"] = is_last
            self.send_while(
                client,
                "/update_weights",
                {"update_info": info},
                lambda batch=batch: self.broadcast(self.groups[client.url], batch),
            )

    def broadcast(self, group: Any, batch: Sequence[tuple[str, Tensor]]) -> None:
        """Broadcast tensors from this process, which is rank 0 of the group."""
        raise NotImplementedError


DTYPES = {"gloo": "dtypes", "nccl": "dtype_names"}
"""Name of the list of dtypes on the server."""


class GlooTransfer(StreamedWeightTransfer):
    """A broadcast between the memories of hosts."""

    backend = "gloo"

    def connect(self, client: ServerClient) -> None:
        if client.url in self.groups:
            return
        host = local_address(urlsplit(client.url).hostname or "")
        size = 1 + client.get("/get_world_size")["world_size"]
        port = free_port(host)
        info = {"host": host, "port": port, "world_size": size, "seconds": self.timeout}
        groups: list[Any] = []
        body = {"init_info": info}
        self.send_while(
            client,
            "/init_weight_transfer_engine",
            body,
            lambda: groups.append(join(host, port, 0, size, self.timeout, serve=True)),
        )
        self.groups[client.url] = groups[0]

    def broadcast(self, group: Any, batch: Sequence[tuple[str, Tensor]]) -> None:
        parts = layout(
            [str(t.dtype).removeprefix("torch.") for _, t in batch],
            [list(t.shape) for _, t in batch],
        )
        buffer = torch.zeros(sum(-(-size // 16) * 16 for _, _, size in parts), dtype=torch.uint8)
        for (_, tensor), (_, offset, size) in zip(batch, parts, strict=True):
            buffer[offset : offset + size] = tensor.reshape(-1).view(torch.uint8)
        group.broadcast(buffer, root=0).wait()


class NcclTransfer(StreamedWeightTransfer):
    """A broadcast between CUDA devices, to vLLM's own transport of that name.

    device: the device of this process.
    """

    backend = "nccl"

    def __init__(self, timeout: float, device: torch.device, *, copies: bool = True) -> None:
        super().__init__(timeout, copies=copies)
        self.device = device

    def connect(self, client: ServerClient) -> None:
        if client.url in self.groups:
            return
        from torch.cuda import nccl

        size = 1 + client.get("/get_world_size")["world_size"]
        ticket = nccl.unique_id()
        info = {
            "rank_offset": 1,
            "world_size": size,
            "nccl_unique_id_b64": base64.b64encode(ticket).decode(),
            "packed": False,
        }
        groups: list[Any] = []

        def join_group() -> None:
            with torch.cuda.device(self.device):
                comm = nccl.init_rank(size, ticket, 0)
                # vLLM all-reduces one number as soon as it has joined
                one = torch.zeros(1, device=self.device)
                nccl.all_reduce([one], [one], comms=[comm])
                torch.cuda.synchronize(self.device)
                groups.append(comm)

        self.send_while(client, "/init_weight_transfer_engine", {"init_info": info}, join_group)
        self.groups[client.url] = groups[0]

    def broadcast(self, group: Any, batch: Sequence[tuple[str, Tensor]]) -> None:
        from torch.cuda import nccl

        with torch.cuda.device(self.device):
            for _, tensor in batch:
                on_device = tensor.to(self.device, non_blocking=True)
                nccl.broadcast([on_device], root=0, comms=[group])
            torch.cuda.synchronize(self.device)


class IpcTransfer(StreamedWeightTransfer):
    """A buffer on the CUDA device that trainer and server share, to vLLM's own transport of that
    name (vllm/distributed/weight_transfer/ipc_engine.py with `packed`).

    The buffer contains some of the weights at a time, which the server copies before it replies.
    device: of this process. buffer_size: see ``STAGED``.
    """

    backend = "ipc"

    def __init__(
        self,
        timeout: float,
        device: torch.device,
        *,
        copies: bool = True,
        buffer_size: int = STAGED,
    ) -> None:
        super().__init__(timeout, copies=copies)
        self.device, self.buffer_size = device, buffer_size
        self.buffer: Tensor | None = None

    def connect(self, client: ServerClient) -> None:
        if client.url not in self.groups:
            client.send("/init_weight_transfer_engine", {"init_info": {"packed": True}})
            self.groups[client.url] = "connected"

    def transfer(self, client: ServerClient) -> None:
        handle = ""
        for batch, is_last in mark_last(shards(self.weights(), self.buffer_size, aligned=True)):
            sizes = [tensor.nbytes for _, tensor in batch]
            has_room = self.buffer is not None and self.buffer.numel() >= sum(sizes)
            if not has_room:
                self.buffer = None  # before the larger one is allocated
                minimum = 0 if is_last and not handle else self.buffer_size
                self.buffer = shareable_buffer(max(minimum, sum(sizes)), self.device)
            assert self.buffer is not None
            if not has_room or not handle:
                # vLLM pairs one export with one release: one export per transfer and buffer
                handle = export(self.buffer)
            parts = self.buffer[: sum(sizes)].split(sizes)
            for (_, tensor), part in zip(batch, parts, strict=True):
                part.copy_(tensor.reshape(-1).view(torch.uint8))
            torch.cuda.synchronize(self.device)  # the server reads without this process's stream
            info = describe(batch, "dtype_names")
            info |= {"tensor_sizes": sizes, "ipc_handles_pickled": handle}
            client.send("/update_weights", {"update_info": info})


def export(buffer: Tensor) -> str:
    """The handle of a CUDA tensor that another process opens, in the form that vLLM reads."""
    from torch.multiprocessing.reductions import reduce_tensor

    uuid = str(torch.cuda.get_device_properties(buffer.device).uuid)
    return base64.b64encode(pickle.dumps({uuid: reduce_tensor(buffer)[1]})).decode()


def shareable_buffer(size: int, device: torch.device) -> Tensor:
    """A CUDA buffer of bytes that other processes can open.

    They often have no permission to open memory of an expandable segment.
    """
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    is_expandable = "expandable_segments:True" in settings
    configure: Any = getattr(  # PyTorch 2.13 renamed it
        torch._C, "_accelerator_setAllocatorSettings", torch.cuda.memory._set_allocator_settings
    )
    if is_expandable:
        configure("expandable_segments:False")
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    finally:
        if is_expandable:
            configure(settings)


class LoraTransfer:
    """An adapter's folder per version, on a disk shared by trainer and server.

    The newest two remain: completions that started before an update finish with their adapter.
    loaded: the adapters of each server, by its address.
    """

    is_stored = True

    def __init__(self, folder: Path) -> None:
        self.folder = empty_folder(folder)
        self.labels: list[str] = []
        self.loaded: dict[str, list[str]] = {}

    def keep(self, label: str, weights: Callable[[], Named], adapter: Adapter | None) -> None:
        if adapter is None:
            raise UserError(
                "the trained model has no adapter",
                code="rollout-transport-needs-adapter",
                where="rollout.transport",
                fix="set it to disk, gloo or nccl",
            )
        (self.folder / label).mkdir(parents=True)
        adapter(self.folder / label)
        self.labels.append(label)

    def send(self, client: ServerClient, label: str) -> None:
        try:
            client.send(
                "/v1/load_lora_adapter", {"lora_name": label, "lora_path": str(self.folder / label)}
            )
        except RequestRefused as error:
            raise UserError(
                f"the server did not accept the adapter: {error.message}",
                code="rollout-weights-refused",
                where=error.where,
                fix="restart the server with --enable-lora, a --max-lora-rank of at least "
                "model.lora.rank, and the environment variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=1; "
                "or use another rollout.transport",
            ) from error
        loaded = self.loaded.setdefault(client.url, [])
        loaded.append(label)
        while len(loaded) > 2:
            self.unload(client, loaded.pop(0))

    def unload(self, client: ServerClient, label: str) -> None:
        """Remove an old adapter from the server, if it is there."""
        with suppress(ServerLost, UserError):
            client.send("/v1/unload_lora_adapter", {"lora_name": label}, seconds=CLEANUP_SECONDS)

    def remove_old(self) -> None:
        while len(self.labels) > 2:
            shutil.rmtree(self.folder / self.labels.pop(0), ignore_errors=True)

    def server_label(self, client: ServerClient) -> str:
        names = {model["id"] for model in client.get("/v1/models")["data"]}
        return next((label for label in reversed(self.labels) if label in names), "")

    def model_name(self, label: str) -> str | None:
        return label

    def close(self, clients: Sequence[ServerClient]) -> None:
        for client in clients:
            for label in self.loaded.pop(client.url, []):
                self.unload(client, label)
        for label in self.labels:
            shutil.rmtree(self.folder / label, ignore_errors=True)


def describe(batch: Sequence[tuple[str, Tensor]], dtypes: str) -> dict[str, Any]:
    """What a server reads of tensors before they arrive. dtypes: its name of their dtypes."""
    return {
        "names": [name for name, _ in batch],
        dtypes: [str(tensor.dtype).removeprefix("torch.") for _, tensor in batch],
        "shapes": [list(tensor.shape) for _, tensor in batch],
    }


def shards(
    weights: Iterable[tuple[str, Tensor]], max_bytes: int, *, aligned: bool = False
) -> Iterator[list[tuple[str, Tensor]]]:
    """Weights in lists of at most ``max_bytes``, but at least one tensor, in order.

    aligned: if the tensors of a list follow each other without gaps, each is at a multiple of its
    item size.
    """
    batch: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        is_unaligned = aligned and size % tensor.itemsize != 0
        if batch and (is_unaligned or size + tensor.nbytes > max_bytes):
            yield batch
            batch, size = [], 0
        batch.append((name, tensor.detach().contiguous()))
        size += tensor.nbytes
    if batch:
        yield batch


def mark_last(batches: Iterable[list[tuple[str, Tensor]]]) -> Iterator[tuple[Any, bool]]:
    """Each batch, and whether it is the last one."""
    previous: list[tuple[str, Tensor]] | None = None
    for batch in batches:
        if previous is not None:
            yield previous, False
        previous = batch
    if previous is not None:
        yield previous, True


def narrow(weights: Named, dtype: torch.dtype | None) -> Named:
    """Cast matrices to the server's dtype if that has fewer bytes. None: it is unknown.

    Vectors remain: they have few bytes, and servers compute with some of them in float32.
    """
    for name, tensor in weights:
        is_wider = (
            dtype is not None
            and tensor.is_floating_point()
            and tensor.ndim > 1
            and tensor.itemsize > dtype.itemsize
        )
        yield name, tensor.detach().to(dtype) if is_wider else tensor.detach()


def host_copy(tensor: Tensor) -> Tensor:
    """A copy in this host's memory.

    Of a tensor on a CUDA device: pinned, and complete once the device is synchronized.
    """
    if tensor.device.type != "cuda":
        return tensor.detach().to("cpu", copy=True).contiguous()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor.detach(), non_blocking=True)


def empty_folder(folder: Path) -> Path:
    """Remove the weights of a killed run. The folder belongs to one generator at a time."""
    folder = Path(folder).absolute()
    refuse_links(folder, folder.parent)
    for old in folder.glob(f"{PREFIX}-*"):
        shutil.rmtree(old, ignore_errors=True)
    return folder


def in_background(work: Callable[[], Any]) -> Future[Any]:
    """The future result of work in a daemon thread, which does not delay the program's end."""
    future: Future[Any] = Future()

    def run() -> None:
        with suppress(ServerLost, UserError, RuntimeError, OSError):  # raised by the future
            try:
                future.set_result(work())
            finally:
                if not future.done():
                    future.set_exception(
                        sys.exception() or RuntimeError("the thread ended without a result")
                    )

    threading.Thread(target=run, daemon=True).start()
    return future
