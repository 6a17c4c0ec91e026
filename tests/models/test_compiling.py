"""The information that the compiler has about the layers."""

from __future__ import annotations

import shutil
import warnings
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import compile_fx
from torch.profiler import ProfilerActivity, profile

from tests.models.test_oracle import PATTERNS, prefix_tree_batch
from tests.prefix_trees import conversations
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny
from valence.models import compiling, flex
from valence.models.build import build_policy
from valence.models.check import plain_batch
from valence.models.compiling import compile_layers, compiled_program
from valence.models.policy_model import PolicyModel
from valence.rollouts import HFGenerator, Sampling


@pytest.mark.slow
def test_attention_is_not_run_again_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler recomputes operators that it considers cheap, and knows only the registered cost
    of this operator.
    """
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    # What decides which values are kept, without the programs that are made then.
    monkeypatch.setattr(
        nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager_decomp_partition")
    )
    engine = build_policy(tiny(dtype=torch.float32), dtype=torch.bfloat16)
    assert compile_layers(engine)
    batch = plain_batch([torch.arange(1, 41), torch.arange(2, 25)])
    engine(batch).logp.sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        engine(batch).logp.sum().backward()
    count = {event.key: event.count for event in profiler.key_averages()}
    layers = engine.causal.config.num_hidden_layers
    assert count["valence::prefix_tree_attention_backward"] == layers
    assert count["valence::prefix_tree_attention"] == layers


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [True, False])
def test_a_layer_that_runs_again_runs_the_same_program(
    adapter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, where something is around each run of an adapter. Only one of the two layers
    runs again.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    lora = (
        SimpleNamespace(rank=3, alpha=None, dropout=0.0, targets="all-linear") if adapter else None
    )
    batches = [plain_batch([torch.arange(1, 41), torch.arange(2, n)]) for n in (25, 60)]

    def engine() -> PolicyModel:
        torch.manual_seed(0)
        actual = build_policy(
            tiny("qwen3", dtype=torch.float32),
            dtype=torch.bfloat16,
            lora=lora,
            checkpointing="selective",
        )
        for name, p in actual.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.1)
        return actual

    plain, compiled = engine(), engine()
    compiled_program.cache_clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the layers of")
        assert compile_layers(compiled)
    for batch in batches:
        runs = [
            (item(batch).logp, [p for p in item.parameters() if p.requires_grad])
            for item in (plain, compiled)
        ]
        wanted, result = (torch.autograd.grad(logp.sum(), weights) for logp, weights in runs)
        torch.testing.assert_close(runs[1][0], runs[0][0], rtol=0.02, atol=0.02)
        for theirs, ours in zip(wanted, result, strict=True):
            torch.testing.assert_close(
                ours, theirs, rtol=0.05, atol=0.05 * float(theirs.abs().max())
            )
    with torch.no_grad():
        compiled.eval()(batches[1])
    with torch.compiler.set_stance("fail_on_recompile"):
        with torch.no_grad():
            torch.testing.assert_close(
                compiled(batches[0]).logp, plain(batches[0]).logp, rtol=0.02, atol=0.02
            )
        compiled.train()(batches[0]).logp.sum().backward()


@pytest.mark.slow
def test_sampling_from_compiled_layers_makes_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer would be one, by its number."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    tokenizer = tiny_tokenizer()
    engine = build_policy(tiny(vocab_size=len(tokenizer), dtype=torch.float32), dtype=torch.float32)
    result: Any = engine.model
    mode = Sampling(max_new_tokens=6)
    with engine.stock():
        wanted = HFGenerator(result, tokenizer).generate([(5, 6, 7)], 2, mode)
    assert compile_layers(engine)
    graphs = counters["stats"]["unique_graphs"]
    with engine.sampling():
        assert HFGenerator(result, tokenizer).generate([(5, 6, 7)], 2, mode) == wanted
    assert counters["stats"]["unique_graphs"] == graphs > 0


def test_two_models_that_sample_at_once_leave_compiled_programs_usable() -> None:
    """As a policy and a reward model in another thread do."""
    graphs: list[Any] = []

    def record(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    first, second = (build_policy(tiny(), dtype=torch.float32).stock() for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    torch.compile(torch.sin, backend=record)(torch.ones(2))
    assert graphs


@pytest.mark.slow
@pytest.mark.parametrize("on_gpu", [True, False])
def test_programs_for_a_gpu_do_not_depend_on_measurements(
    on_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a run that resumes with another cache of programs may round differently. Forward
    and backward pass are compiled with the setting.
    """
    compiled: list[bool] = []
    compile_inner = compile_fx._compile_fx_inner

    def follow(*inputs: Any, **options: Any) -> Any:
        compiled.append(torch._inductor.config.deterministic)
        return compile_inner(*inputs, **options)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    options = flex.compiler_options()
    monkeypatch.undo()
    monkeypatch.setattr(compile_fx, "_compile_fx_inner", follow)
    # not the cache of earlier runs on the disk
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x = torch.ones(3, requires_grad=True)
    torch.compile(lambda x: x.sin().sum(), options=options)(x).backward()
    assert compiled == [on_gpu] * 2


def test_all_programs_for_a_gpu_are_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[Any] = []

    def follow(function: Any, **options: Any) -> Any:
        settings.append(options["options"])
        return function

    monkeypatch.setattr(torch, "compile", follow)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    compiling.compiled_program.__wrapped__(len)
    flex._compiled.__wrapped__()
    layer = nn.Identity()
    layer.gradient_checkpointing = False  # type: ignore[assignment]
    compiling._compile(layer, is_sharded=False)
    assert settings == [{"deterministic": True}] * 3


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*torch.compile.*")
def test_layers_are_compiled_around_the_attention_of_cuda() -> None:
    """Which has no backward pass on a CPU.

    The programs are for any number of tokens, and a second pass reads the first one's keys.
    """
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    batches = [prefix_tree_batch(conversations(), trains) for trains in PATTERNS] + [
        plain_batch([torch.arange(1, n)]) for n in (30, 70)
    ]
    engine = build_policy(tiny(dtype=torch.float32), dtype=torch.float32).requires_grad_(False)
    wanted = [engine(batch).logp for batch in batches]
    engine.attention_backend, engine.max_joint_rows = "flex", 0
    assert compile_layers(engine)
    engine(batches[-1])
    with torch.compiler.set_stance("fail_on_recompile"):
        results = [engine(batch).logp for batch in batches]
    for ours, theirs in zip(results, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_rounding_is_distinguished_from_a_different_computation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One random token may be far off in bfloat16, but not all of them."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    monkeypatch.setattr(nn.Module, "compile", lambda *_, **__: None)
    compute = compiling.scores_or_logps
    one = torch.zeros(40)
    one[7] = 0.9
    for off, fine in ((one, True), (torch.full((40,), 0.4), False)):
        engine = build_policy(tiny(dtype=torch.float32), dtype=torch.bfloat16)
        added = iter([torch.zeros(40), off])
        monkeypatch.setattr(
            compiling,
            "scores_or_logps",
            lambda engine, batch, added=added: compute(engine, batch) + next(added),
        )
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            assert compile_layers(engine) is fine
        assert [item.category for item in heard] == ([] if fine else [UserWarning])
        assert all("0.4" in str(item.message) for item in heard)
