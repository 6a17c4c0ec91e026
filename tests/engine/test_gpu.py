"""The same numbers on a CUDA device as on the CPU, in float32 and bfloat16."""

from __future__ import annotations

import pytest
import torch

from tests.models import tiny
from tests.units import units
from valence.data.pack import collate
from valence.engine.logprobs import Engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.3)])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_log_probabilities_and_gradients_agree(name: str, dtype: torch.dtype, tolerance: float) -> None:
    rows = units("judgement")
    found = {}
    for device in ("cpu", "cuda"):
        engine = Engine(tiny(name, dtype=dtype).to(device))
        logp = engine(collate(rows, range(len(rows)), device=device)).logp
        logp.sum().backward()
        norm = torch.stack([p.grad.float().norm() for p in engine.parameters() if p.grad is not None]).norm()
        found[device] = logp.detach().cpu(), norm.cpu()
    torch.testing.assert_close(found["cuda"][0], found["cpu"][0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found["cuda"][1], found["cpu"][1], rtol=max(tolerance, 0.02), atol=1e-3)
