"""How new weights get to a vLLM server while it serves.

Full weights: ``/pause`` (requests are frozen, caches are dropped), ``/init_weight_transfer_engine``
once, ``/start_weight_update``, ``/update_weights``, ``/finish_weight_update`` with the version's
label, ``/resume``. The server's side of ``disk`` and ``gloo`` is the plugin in ``vllm_plugin.py``;
that of ``nccl`` is vLLM's own. Adapters (``lora``): a folder per version, loaded under the
version's label as its name.
"""

from __future__ import annotations

import base64
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
from valence.rollouts.protocol import Named
from valence.rollouts.vllm_plugin import free, join, layout, own_address
from valence.rollouts.wire import Lost, Refused, Wire

SHARD = 2**30
"""Bytes of weights in a file, or in one broadcast."""

PREFIX = "valence"
"""Of the labels of weights that Valence sent."""

FAILED = f"{PREFIX}-failed"
"""Label of weights that are partly new and partly old."""

LAST_RESORT = 5.0
"""Seconds for each request that tidies up after an error."""

Adapter = Callable[[Path], None]


class WeightTransfer(Protocol):
    """Keeps the newest weights until the next ones come, so that a server that lost them can be
    given them again.
    """

    def keep(self, label: str, weights: Callable[[], Named], adapter: Adapter | None) -> None:
        """Takes the weights of a version."""
        ...

    def send(self, wire: Wire, label: str) -> None:
        """Gives the server what was kept."""
        ...

    def label(self, wire: Wire) -> str:
        """Which weights the server has; of another's or none: something that was never kept."""
        ...

    def model(self, label: str) -> str | None:
        """What a request names to be answered with these weights."""
        ...

    def close(self, wire: Wire) -> None:
        """Gives back folders and groups."""
        ...


class WholeWeightTransfer:
    """All weights of a model: what disk, gloo and nccl have in common."""

    backend: str
    sent = ""

    def keep(self, label: str, weights: Callable[[], Named], adapter: Adapter | None) -> None:
        raise NotImplementedError

    def connect(self, wire: Wire) -> None:
        """Agrees with a server on how weights travel, if that has not been done."""
        raise NotImplementedError

    def disconnect(self) -> None:
        """Forgets what was agreed on."""
        raise NotImplementedError

    def transfer(self, wire: Wire) -> None:
        """Sends the kept weights between start and finish."""
        raise NotImplementedError

    def label(self, wire: Wire) -> str:
        return str(wire.get("/weight_info")["weight_version"])

    def model(self, label: str) -> str | None:
        return None

    def send(self, wire: Wire, label: str) -> None:
        if self.label(wire) != self.sent:
            # another server than the one that was spoken to: it was started again
            self.disconnect()
        self.sent = ""
        try:
            wire.tell("/pause?mode=keep&clear_cache=true")
            self.connect(wire)
            begin(wire)
            self.transfer(wire)
            wire.tell("/finish_weight_update", {"weight_version": label})
            wire.tell("/resume")
            self.sent = label
        except Refused as error:
            raise self.refusal(error) from error
        finally:
            if self.sent != label:
                self.disconnect()
                release(wire)

    def refusal(self, error: Refused) -> UserError:
        """What may be the matter with a server that takes no weights."""
        return UserError(
            f"the server did not take the new weights: {error.message}",
            code="rollout-weights-refused",
            where=error.where,
            fix=f'start it with --weight-transfer-config \'{{"backend": "{self.backend}"}}\' and '
            f"Valence's plugin installed "
            "(docs/vllm.md); its log says more",
        )

    def close(self, wire: Wire) -> None:
        self.disconnect()


def begin(wire: Wire) -> None:
    """Starts an update, ending one that a trainer left open."""
    try:
        wire.tell("/start_weight_update")
    except Refused as error:
        if "already active" not in error.message:
            raise
        with suppress(Refused):
            wire.tell("/update_weights", {"update_info": {}})  # an update that fails is closed
        wire.tell("/start_weight_update")


def release(wire: Wire) -> None:
    """After an update that failed: no answer may count as one of known weights, and no request may
    wait for ever.
    """
    for path, body in (
        ("/update_weight_version", {"new_version": FAILED}),
        ("/abort_requests", {}),
        ("/resume", None),
    ):
        with suppress(Lost, UserError):  # what made the update fail is what is raised
            wire.tell(path, body, seconds=LAST_RESORT)


class DiskTransfer(WholeWeightTransfer):
    """A folder of safetensors files per version, on a disk that trainer and server both see."""

    backend = "disk"

    def __init__(self, folder: Path) -> None:
        self.folder, self.current = emptied(folder), Path()

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

    def connect(self, wire: Wire) -> None:
        pass

    def disconnect(self) -> None:
        pass

    def transfer(self, wire: Wire) -> None:
        wire.tell("/update_weights", {"update_info": {"folder": str(self.current)}})

    def close(self, wire: Wire) -> None:
        if self.current != Path():
            shutil.rmtree(self.current, ignore_errors=True)


class CopiedWeightTransfer(WholeWeightTransfer):
    """Weights that travel from memory to memory.

    A copy is kept in this host's memory until the next version.
    """

    kept: Sequence[tuple[str, Tensor]] = ()
    group: Any = None

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout

    def keep(self, label: str, weights: Callable[[], Named], adapter: Adapter | None) -> None:
        self.kept = [
            (name, tensor.detach().to("cpu", copy=True).contiguous()) for name, tensor in weights()
        ]

    def disconnect(self) -> None:
        self.group = None

    def together(self, wire: Wire, path: str, body: object, ours: Callable[[], None]) -> None:
        """Posts while ``ours`` does this side's part.

        Neither is waited for once the other has failed, or beyond the deadline.
        """
        theirs, mine = background(lambda: wire.tell(path, body)), background(ours)
        until = time.monotonic() + self.timeout
        while not (theirs.done() and mine.done()):
            for each in (theirs, mine):
                if each.done():
                    each.result()
            if time.monotonic() > until:
                raise wire.hangs(path, self.timeout)
            time.sleep(0.0005)
        theirs.result()
        mine.result()

    def transfer(self, wire: Wire) -> None:
        batches = list(shards(self.kept, SHARD))
        for number, batch in enumerate(batches):
            info = {
                "names": [name for name, _ in batch],
                DTYPES[self.backend]: [
                    str(tensor.dtype).removeprefix("torch.") for _, tensor in batch
                ],
                "shapes": [list(tensor.shape) for _, tensor in batch],
            }
            if self.backend == "gloo":
                info["last"] = number == len(batches) - 1  # type: ignore[assignment]
            self.together(
                wire,
                "/update_weights",
                {"update_info": info},
                lambda batch=batch: self.broadcast(batch),
            )

    def broadcast(self, batch: Sequence[tuple[str, Tensor]]) -> None:
        """Sends tensors from this process, which is number 0 of the group."""
        raise NotImplementedError


DTYPES = {"gloo": "dtypes", "nccl": "dtype_names"}
"""What the server's side calls the list of dtypes."""


class GlooTransfer(CopiedWeightTransfer):
    """A broadcast between hosts' memories."""

    backend = "gloo"

    def connect(self, wire: Wire) -> None:
        if self.group is not None:
            return
        host = own_address(urlsplit(wire.url).hostname or "")
        size = 1 + wire.get("/get_world_size")["world_size"]
        port = free(host)
        info = {"host": host, "port": port, "world_size": size, "seconds": self.timeout}
        made: list[Any] = []
        body = {"init_info": info}
        self.together(
            wire,
            "/init_weight_transfer_engine",
            body,
            lambda: made.append(join(host, port, 0, size, self.timeout, serve=True)),
        )
        self.group = made[0]

    def broadcast(self, batch: Sequence[tuple[str, Tensor]]) -> None:
        parts = layout(
            [str(t.dtype).removeprefix("torch.") for _, t in batch],
            [list(t.shape) for _, t in batch],
        )
        row = torch.zeros(sum(-(-size // 16) * 16 for _, _, size in parts), dtype=torch.uint8)
        for (_, tensor), (_, at, size) in zip(batch, parts, strict=True):
            row[at : at + size] = tensor.reshape(-1).view(torch.uint8)
        self.group.broadcast(row, root=0).wait()


class NcclTransfer(CopiedWeightTransfer):
    """A broadcast between CUDA devices, to vLLM's own transport of that name.

    ``device``: of this process.
    """

    backend = "nccl"

    def __init__(self, timeout: float, device: torch.device) -> None:
        super().__init__(timeout)
        self.device = device

    def connect(self, wire: Wire) -> None:
        if self.group is not None:
            return
        from torch.cuda import nccl

        size = 1 + wire.get("/get_world_size")["world_size"]
        ticket = nccl.unique_id()
        info = {
            "rank_offset": 1,
            "world_size": size,
            "nccl_unique_id_b64": base64.b64encode(ticket).decode(),
            "packed": False,
        }
        made: list[Any] = []

        def enter() -> None:
            with torch.cuda.device(self.device):
                comm = nccl.init_rank(size, ticket, 0)
                # The server's side adds up one number as soon as it has joined, and waits for this
                # one.
                one = torch.zeros(1, device=self.device)
                nccl.all_reduce([one], [one], comms=[comm])
                torch.cuda.synchronize(self.device)
                made.append(comm)

        self.together(wire, "/init_weight_transfer_engine", {"init_info": info}, enter)
        self.group = made[0]

    def broadcast(self, batch: Sequence[tuple[str, Tensor]]) -> None:
        from torch.cuda import nccl

        with torch.cuda.device(self.device):
            for _, tensor in batch:
                nccl.broadcast([tensor.to(self.device)], root=0, comms=[self.group])
            torch.cuda.synchronize(self.device)


class LoraTransfer:
    """An adapter's folder per version, on a disk that trainer and server both see.

    The newest two stay: answers that began before an update end with the adapter they began with.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = emptied(folder)
        self.labels: list[str] = []

    def keep(self, label: str, weights: Callable[[], Named], adapter: Adapter | None) -> None:
        if adapter is None:
            raise UserError(
                "the model that is trained has no adapter",
                code="rollout-transport-needs-adapter",
                where="rollout.transport",
                fix="use disk, gloo or nccl",
            )
        (self.folder / label).mkdir(parents=True)
        adapter(self.folder / label)
        self.labels.append(label)

    def send(self, wire: Wire, label: str) -> None:
        try:
            wire.tell(
                "/v1/load_lora_adapter", {"lora_name": label, "lora_path": str(self.folder / label)}
            )
        except Refused as error:
            raise UserError(
                f"the server did not take the adapter: {error.message}",
                code="rollout-weights-refused",
                where=error.where,
                fix="start it with --enable-lora, a --max-lora-rank of at least model.lora.rank, "
                "and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, or use another rollout.transport",
            ) from error
        while len(self.labels) > 2:
            self.drop(wire, self.labels.pop(0))

    def drop(self, wire: Wire, label: str) -> None:
        """Takes an old adapter from the server, which may have been started again and not know it,
        and removes its folder.
        """
        with suppress(Lost, UserError):
            wire.tell("/v1/unload_lora_adapter", {"lora_name": label}, seconds=LAST_RESORT)
        shutil.rmtree(self.folder / label, ignore_errors=True)

    def label(self, wire: Wire) -> str:
        names = {model["id"] for model in wire.get("/v1/models")["data"]}
        return next((label for label in reversed(self.labels) if label in names), "")

    def model(self, label: str) -> str | None:
        return label

    def close(self, wire: Wire) -> None:
        while self.labels:
            self.drop(wire, self.labels.pop(0))


def shards(weights: Iterable[tuple[str, Tensor]], most: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Weights in lists of at most ``most`` bytes, but at least one tensor, in order."""
    batch: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if batch and size + tensor.nbytes > most:
            yield batch
            batch, size = [], 0
        batch.append((name, tensor.detach().contiguous()))
        size += tensor.nbytes
    if batch:
        yield batch


def emptied(folder: Path) -> Path:
    """The folder without what a killed run left in it. It belongs to one generator at a time."""
    folder = Path(folder).absolute()
    refuse_links(folder, folder.parent)
    for left in folder.glob(f"{PREFIX}-*"):
        shutil.rmtree(left, ignore_errors=True)
    return folder


def background(work: Callable[[], Any]) -> Future[Any]:
    """The result of work in a thread that nobody has to wait for, not even at the end of the
    program.
    """
    future: Future[Any] = Future()

    def run() -> None:
        with suppress(Lost, UserError, RuntimeError, OSError):  # they are in the future
            try:
                future.set_result(work())
            finally:
                if not future.done():
                    future.set_exception(
                        sys.exception() or RuntimeError("it ended without a result")
                    )

    threading.Thread(target=run, daemon=True).start()
    return future
