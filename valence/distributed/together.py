"""What processes tell each other in words: what one of them found, what each of them has, whether
they agree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from valence.distributed.protocol import Group
from valence.errors import UserError

TENSOR = "__tensor__"


def by_first(group: Group, action: Callable[[], Any]) -> Any:
    """What the action gives to rank 0, which alone does it, as JSON carries it.

    Its UserError is raised by all.
    """
    if group.size == 1:
        return action()
    told: dict[str, Any] = {}
    if group.rank == 0:
        try:
            told = {"found": action()}
        except UserError as error:
            group.broadcast({"mistake": error.facts})
            raise
    told = group.broadcast(told)
    if "mistake" in told:
        raise UserError(**told["mistake"])
    return told["found"]


def gathered(group: Group, value: Any) -> list[Any]:
    """What each process gives, in the order of ranks: what JSON carries, and tensors, which arrive
    on the host.
    """
    if group.size == 1:
        return [value]
    line = json.dumps(value, default=_said).encode() + b"\n"
    lines = group.gather(torch.frombuffer(bytearray(line), dtype=torch.uint8)).numpy().tobytes()
    return [json.loads(each, object_hook=_heard) for each in lines.splitlines()]


def _said(tensor: Tensor) -> dict[str, Any]:
    """A tensor to the last bit."""
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return {
        TENSOR: str(tensor.dtype).removeprefix("torch."),
        "axes": list(tensor.shape),
        "bytes": content.hex(),
    }


def _heard(value: dict[str, Any]) -> Any:
    if TENSOR not in value:
        return value
    content = torch.frombuffer(
        bytearray.fromhex(value["bytes"]) or bytearray(1), dtype=torch.uint8
    )[: len(value["bytes"]) // 2]
    return content.view(getattr(torch, value[TENSOR])).view(value["axes"])


def same(group: Group, facts: Callable[[], Mapping[str, Any]], fix: str) -> None:
    """Raises UserError, with the names of what differs, when the facts of some process are not
    those of rank 0.
    """
    if group.size == 1:
        return
    lines = {
        name: json.dumps(value, sort_keys=True, default=str) for name, value in facts().items()
    }
    own = {name: hashlib.sha256(line.encode()).hexdigest() for name, line in lines.items()}
    first, *others = gathered(group, own)
    for rank, found in enumerate(others, 1):
        odd = [
            name
            for name in sorted(first.keys() | found.keys())
            if first.get(name) != found.get(name)
        ]
        if odd:
            more = f" and {len(odd) - 4} more" if len(odd) > 4 else ""
            raise UserError(
                f"rank {rank} has another {', '.join(odd[:4])}{more} than rank 0",
                code="ranks-differ",
                where=f"rank {rank}",
                fix=fix,
            )
