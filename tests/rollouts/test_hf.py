"""Sampling and scoring with a model of this process."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache, Gemma2Config, GPT2Config, LlamaConfig

from tests.errors import raises_error
from tests.rollouts.vllm_server import END, Words
from valence.rollouts import HFGenerator, Sampling, kv
from valence.rollouts.hf import draw
from valence.types import Ids, Origin, Prompt

VOCABULARY = 61
ENDS = set(range(20, 32))
PROMPTS = [(5, 6, 7), (8, 9, 10, 11, 12, 13, 14), (15,), (5, 6, 9, 20)]
FREE = Sampling(temperature=0.9, max_new_tokens=12, seed=4)
GREEDY = Sampling(temperature=0.0, max_new_tokens=12)


def tiny(kind: str = "llama") -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    small: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "bos_token_id": 1,
        "eos_token_id": END,
        "pad_token_id": 0,
    }
    heads: dict[str, Any] = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    configs = {
        "llama": lambda: LlamaConfig(**small, **heads, intermediate_size=48),
        "gemma2": lambda: Gemma2Config(
            **small, **heads, intermediate_size=48, head_dim=8, sliding_window=4
        ),
        "gpt2": lambda: GPT2Config(**small, n_layer=2, n_embd=32, n_head=4, n_positions=1024),
    }
    model = AutoModelForCausalLM.from_config(configs[kind](), dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            # A fresh model's tiny weights predict nearly the same everywhere, and the tests would
            # see nothing.
            if p.dim() == 2:
                p.mul_(8)
    return model


@pytest.fixture(
    scope="module", params=["llama", "gemma2", pytest.param("gpt2", marks=pytest.mark.slow)]
)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param)


def generator(model: Any, **settings: Any) -> HFGenerator:
    return HFGenerator(model, Words(), **settings)  # type: ignore[arg-type]


def oracle(
    model: Any, prompt: tuple[int, ...], tokens: tuple[int, ...], temperature: float
) -> list[float]:
    """Log-probabilities of ``tokens`` from one forward over the whole row, without cache and
    padding.
    """
    model.eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return (
        (logits / temperature)
        .log_softmax(-1)
        .gather(1, torch.tensor(tokens)[:, None])
        .squeeze(1)
        .tolist()
    )


def test_logps_are_those_of_one_forward_over_the_whole_row(model: Any) -> None:
    for prompt, answers in zip(PROMPTS, generator(model).generate(PROMPTS, 3, FREE), strict=True):
        for answer in answers:
            assert answer.logps == pytest.approx(
                oracle(model, prompt, answer.tokens, 0.9), abs=2e-4
            )


def test_greedy_answers_do_not_depend_on_the_batch(model: Any) -> None:
    alone = [generator(model).generate([p], 1, GREEDY)[0][0] for p in PROMPTS]
    together = [answers[0] for answers in generator(model).generate(PROMPTS, 1, GREEDY)]
    assert [a.tokens for a in together] == [a.tokens for a in alone]
    assert len({a.tokens for a in together}) > 1
    for a, b in zip(together, alone, strict=True):
        assert a.logps == pytest.approx(b.logps, abs=2e-4)


def test_greedy_takes_the_most_likely_token(model: Any) -> None:
    answer = generator(model).generate([PROMPTS[0]], 1, GREEDY)[0][0]
    model.eval()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[0] + answer.tokens])).logits[
            0, len(PROMPTS[0]) - 1 : -1
        ]
    assert tuple(logits.argmax(-1).tolist()) == answer.tokens
    assert answer.logps == pytest.approx(oracle(model, PROMPTS[0], answer.tokens, 1.0), abs=2e-4)


def test_sampled_answers_do_not_depend_on_the_batch_size() -> None:
    model = tiny()
    wide = generator(model, batch_size=64).generate(PROMPTS, 3, FREE)
    narrow = generator(model, batch_size=1).generate(PROMPTS, 3, FREE)
    assert [[a.tokens for a in row] for row in wide] == [[a.tokens for a in row] for row in narrow]


def test_the_padding_token_has_no_influence() -> None:
    model = tiny()
    first, second = (
        generator(model, end_ids=[pad, END]).generate(PROMPTS, 1, GREEDY) for pad in (0, 2)
    )
    ends = {0, 2}
    assert not any(ends & set(a.tokens) for row in (*first, *second) for a in row), (
        "needs answers without them"
    )
    assert first == second


def test_seeds_reproduce_and_differ() -> None:
    sample = generator(tiny())
    assert sample.generate(PROMPTS, 2, FREE) == sample.generate(PROMPTS, 2, FREE)
    other = Sampling(temperature=0.9, max_new_tokens=12, seed=5)
    assert sample.generate(PROMPTS, 2, FREE) != sample.generate(PROMPTS, 2, other)
    torch.manual_seed(1)
    before = torch.rand(1)
    torch.manual_seed(1)
    sample.generate(PROMPTS, 1, FREE)
    assert torch.equal(torch.rand(1), before), "sampling must leave the global random state alone"


def test_an_answer_ends_with_its_first_end_token() -> None:
    model = tiny()
    ends = ENDS
    answers = [a for row in generator(model, end_ids=ends).generate(PROMPTS, 8, FREE) for a in row]
    stopped = [a for a in answers if a.stop == "eos"]
    assert stopped
    assert len(stopped) < len(answers)
    for answer in stopped:
        assert answer.tokens[-1] in ends
        assert not ends & set(answer.tokens[:-1])
    for answer in (a for a in answers if a.stop == "length"):
        assert not ends & set(answer.tokens)
        assert len(answer.tokens) == FREE.max_new_tokens
    assert all(len(a.tokens) == len(a.logps) for a in answers)


def test_end_tokens_come_from_tokenizer_and_generation_config() -> None:
    model = tiny()
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [END, 17]
    assert generator(model).end_ids == [END, 17]
    model.generation_config.eos_token_id = None
    assert generator(model).end_ids == [END]


def test_text_and_ids() -> None:
    (answer,) = generator(tiny(), end_ids=[END]).generate([(5, 6)], 1, GREEDY)[0]
    assert answer.text == " ".join(str(t) for t in answer.tokens if t != END)
    assert answer.prompt_id == Prompt(prompt=Ids((5, 6)), origin=Origin("x", 1)).id


def test_adapter_on_and_off() -> None:
    def tokens(model: Any) -> list[tuple[int, ...]]:
        return [row[0].tokens for row in generator(model).generate(PROMPTS, 1, GREEDY)]

    plain = tokens(tiny())
    model = get_peft_model(
        tiny(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    )  # type: ignore[arg-type]
    assert tokens(model) != plain
    with model.disable_adapter():
        assert tokens(model) == plain


def test_modes_are_restored_and_dropout_is_off() -> None:
    model = tiny("gpt2")
    model.train()
    model.transformer.h[0].eval()
    modes = [m.training for m in model.modules()]
    sample = generator(model)
    assert sample.generate(PROMPTS, 1, GREEDY) == sample.generate(PROMPTS, 1, GREEDY)
    assert [m.training for m in model.modules()] == modes


def test_modes_are_restored_after_an_error() -> None:
    model = tiny()
    model.train()
    with torch.no_grad():
        model.get_input_embeddings().weight[PROMPTS[0][0]] = math.nan
    with pytest.raises(FloatingPointError):
        generator(model).generate(PROMPTS, 1, FREE)
    assert all(m.training for m in model.modules())


def test_new_weights_carry_a_version() -> None:
    model, other = tiny(), tiny()
    with torch.no_grad():
        other.get_input_embeddings().weight.mul_(-1)
    sample = generator(model)
    sample.load_weights(3, dict(other.named_parameters()))
    mine, theirs = (
        sample.generate(PROMPTS, 1, GREEDY),
        generator(other).generate(PROMPTS, 1, GREEDY),
    )
    assert [r[0].tokens for r in mine] == [r[0].tokens for r in theirs]
    assert {r[0].version for r in mine} == {3}
    with pytest.raises(KeyError, match=r"no\.such"):
        sample.load_weights(4, {"no.such": torch.zeros(1)})
    assert sample.version == 3


def test_bad_requests_are_named() -> None:
    sample = generator(tiny())
    with raises_error("prompt-empty", where="prompt 1"):
        sample.generate([(4,), ()], 1, GREEDY)
    with raises_error("sampling-value", where="n"):
        sample.generate(PROMPTS, 0, GREEDY)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("max_new_tokens", 0),
        ("max_new_tokens", 10**11),
        ("seed", -1),
        ("seed", 10**30),
        ("top_p", 0.0),
        ("top_p", 1.1),
    ],
)
def test_sampling_out_of_range_is_named(name: str, value: float) -> None:
    with raises_error("sampling-value", where=name):
        Sampling(**{name: value})  # type: ignore[arg-type]


def mamba() -> Any:
    from transformers import AutoModelForCausalLM, MambaConfig

    torch.manual_seed(0)
    small: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "state_size": 4,
    }
    return AutoModelForCausalLM.from_config(
        MambaConfig(**small, eos_token_id=END), dtype=torch.float32
    )


def test_a_model_without_a_cache_of_keys_is_refused() -> None:
    model = mamba()
    with raises_error(
        "sampling-unsupported", where="model.name", fix="run.samples.prompts"
    ) as raised:
        generator(model).generate(PROMPTS, 1, GREEDY)
    assert type(model).__name__ in raised.error.message


@pytest.mark.parametrize("kind", ["llama", "adapter", "mamba"])
@torch.no_grad()
def test_the_cache_of_a_model_is_passed_under_the_name_that_its_forward_has(
    kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model = (mamba() if kind == "mamba" else tiny()).eval()
    if kind == "adapter":
        model = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    tokens = torch.tensor([PROMPTS[1]])
    expected = model(input_ids=tokens).logits
    capfd.readouterr()
    logits, cache = [], None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for token in tokens.split(1, 1):
            output, cache = kv.forward_with_cache(model, cache, input_ids=token)
            logits.append(output.logits)
    torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=1e-4, atol=1e-5)
    assert "deprecated" not in capfd.readouterr().err


def test_no_prompts_no_answers() -> None:
    assert generator(tiny()).generate([], 2, FREE) == []


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-5, 1.0])
@pytest.mark.parametrize("top_p", [1e-300, 1e-40, 1.0])
def test_extreme_sampling_parameters_leave_the_most_likely_token(
    temperature: float, top_p: float
) -> None:
    logits = torch.tensor([[3.0, 80.0, -60.0, 79.0], [0.5, 0.25, 0.0, float("-inf")]])
    mode = Sampling(temperature=temperature, top_p=top_p)
    token, logp = draw(logits, torch.tensor([0.9, 0.2]), mode)
    assert logp.isfinite().all()
    if temperature < 1 or top_p < 1:
        assert (token.tolist(), logp.tolist()) == ([1, 0], [0.0, 0.0])


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 2.0, -1.0, 1.0])
    n = 20_000
    uniform = torch.rand(n, generator=torch.Generator().manual_seed(0))
    token, logp = draw(logits.expand(n, 4), uniform, Sampling(temperature=0.5))
    p = (logits / 0.5).softmax(0)
    share = torch.bincount(token, minlength=4) / n
    assert torch.all((share - p).abs() < 4 * (p * (1 - p) / n).sqrt())
    assert torch.allclose(logp, p.log()[token])


def test_top_p_keeps_the_smallest_sufficient_set_and_renormalises() -> None:
    p = torch.tensor([[0.1, 0.5, 0.05, 0.35]])
    uniform = torch.tensor([0.0, 0.3, 0.6, 0.9999999])
    token, logp = draw(p.log().expand(4, 4), uniform, Sampling(top_p=0.8))
    assert token.tolist() == [1, 1, 3, 3]
    assert logp.exp().tolist() == pytest.approx([0.5 / 0.85, 0.5 / 0.85, 0.35 / 0.85, 0.35 / 0.85])


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf]]).expand(3, 3)
    token, logp = draw(logits, torch.tensor([0.0, 0.5, 1 - 2**-24]), Sampling())
    assert token.tolist() == [1, 1, 1]
    assert logp.tolist() == [0, 0, 0]


@pytest.mark.parametrize("size", [4, 256, 768, 700])
def test_any_vocabulary_is_drawn_from_by_its_distribution(size: int) -> None:
    """Against the inverse of the distribution function in float64, in which most tokens have next
    to no probability.
    """
    rng = torch.Generator().manual_seed(size)
    logits = (torch.randn(size, generator=rng) * 4).masked_fill(
        torch.rand(size, generator=rng) < 0.3, -math.inf
    )
    n = 2000
    uniform = torch.rand(n, generator=rng)
    uniform[:2] = torch.tensor([0.0, 1 - 2**-24])
    token, logp = draw(logits.expand(n, size).clone(), uniform, Sampling(temperature=0.7))
    p = (logits.double() / 0.7).softmax(0)
    assert (p[token] > 0).all()
    torch.testing.assert_close(logp.double(), p.log()[token], rtol=1e-6, atol=2e-6)
    above, below = p.cumsum(0)[token], p.cumsum(0)[token] - p[token]
    assert (uniform < above + 1e-6).all()
    assert (uniform > below - 1e-6).all()


def test_drawing_leaves_the_logits_as_they_are() -> None:
    logits = torch.randn(3, 300)
    before = logits.clone()
    for sampling in (
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(top_p=0.5),
        Sampling(temperature=0),
    ):
        draw(logits, torch.rand(3), sampling)
        assert torch.equal(logits, before)


@pytest.mark.parametrize(("ends", "limit"), [(ENDS, 12), ({20}, 3 * kv.GROWTH)])
def test_keys_and_values_are_kept_where_they_belong(model: Any, ends: set[int], limit: int) -> None:
    """Whenever memory has to grow, and whichever rows end before."""
    sampling = replace(FREE, max_new_tokens=limit)
    rows = generator(model, end_ids=ends).generate(PROMPTS, 8, sampling)
    assert len({len(a.tokens) for row in rows for a in row}) > 3
    for prompt, answers in zip(PROMPTS, rows, strict=True):
        assert [a.index for a in answers] == list(range(8))
        for answer in answers:
            assert answer.logps == pytest.approx(
                oracle(model, prompt, answer.tokens, 0.9), abs=2e-4
            )


def test_a_token_is_written_behind_those_that_are_there_and_an_end_moves_one_row() -> None:
    grown = DynamicCache()
    rng = torch.Generator().manual_seed(0)
    first, second = (torch.randn(2, 3, 5, 4, generator=rng) for _ in range(2))
    grown.update(first, second, 0)
    index = torch.tensor([0, 0, 1, 1])
    kv.select_rows(grown, index)
    wanted = [first[index], second[index]]
    layer: Any = grown.layers[0]
    at = layer.keys.data_ptr()
    new = torch.randn(2, 4, 3, 1, 4, generator=rng)
    result = grown.update(new[0], new[1], 0)
    wanted = [torch.cat(pair, 2) for pair in zip(wanted, new, strict=True)]
    assert all(torch.equal(one, other) for one, other in zip(result, wanted, strict=True))
    (left,) = kv.remove_finished(grown, torch.tensor([1, 3]), (torch.arange(4),))
    assert left.tolist() == [3, 1]
    for part, other in zip((layer.keys, layer.values), wanted, strict=True):
        assert torch.equal(part, other[left])
    assert layer.keys.data_ptr() == at
    assert grown.get_seq_length() == 6
    new = torch.randn(2, 2, 3, 70, 4, generator=rng)
    result = grown.update(new[0], new[1], 0)
    wanted = [torch.cat([one[left], other], 2) for one, other in zip(wanted, new, strict=True)]
    assert all(torch.equal(one, other) for one, other in zip(result, wanted, strict=True))


def test_the_cache_doubles_up_to_the_longest_possible_completion() -> None:
    """Each of these sizes is a separate block of a device's memory."""
    blocks: dict[int, torch.Tensor] = {}  # kept, so that no address is used twice
    prompt, model = PROMPTS[0], tiny()

    def record(_module: Any, _inputs: Any, output: Any) -> None:
        layers = [x for x in output.past_key_values.layers if isinstance(x, kv.PreallocatedLayer)]
        blocks.update((part.data_ptr(), part) for layer in layers for part in layer.memory)

    model.register_forward_hook(record)
    sampling = replace(FREE, max_new_tokens=300)
    ((completion,),) = generator(model, end_ids=(10**6,)).generate([prompt], 1, sampling)
    assert len(completion.tokens) == 300
    capacities = [part.shape[2] for part in blocks.values()]
    start, limit = len(prompt) + kv.GROWTH, len(prompt) + 300
    expected = [start, 2 * start, 4 * start, limit]
    assert sorted(set(capacities)) == [size for size in expected if size < limit] + [limit]
    assert len(capacities) == 2 * len(model.model.layers) * len(set(capacities))


def test_slices_of_a_list_of_prompts_are_answered_as_the_whole() -> None:
    sample = generator(tiny())
    full = sample.generate(PROMPTS, 3, FREE)
    for cut in range(1, len(PROMPTS)):
        parts = (
            sample.generate(PROMPTS[:cut], 3, FREE),
            sample.generate(PROMPTS[cut:], 3, FREE, first=cut),
        )
        assert [[a.tokens for a in row] for part in parts for row in part] == [
            [a.tokens for a in row] for row in full
        ]
    elsewhere = sample.generate(PROMPTS[1:], 3, FREE)
    assert [[a.tokens for a in row] for row in elsewhere] != [
        [a.tokens for a in row] for row in full[1:]
    ]
    same = sample.generate([PROMPTS[0]] * 2, 2, FREE)
    assert len({a.tokens for row in same for a in row}) == 4, (
        "the same prompt twice, and each has answers of its own"
    )


def test_more_answers_or_longer_ones_begin_as_fewer_and_shorter_ones() -> None:
    sample = generator(tiny())
    few = sample.generate(PROMPTS, 2, FREE)
    more = sample.generate(PROMPTS, 5, replace(FREE, max_new_tokens=20))
    for one, other in zip(few, more, strict=True):
        assert [a.tokens for a in one] == [a.tokens[:12] for a in other[:2]]
    assert max(len(a.tokens) for row in more for a in row) == 20


def test_progress_is_told_of_every_answer_once_and_may_end_it() -> None:
    model = tiny()
    sample = generator(model, end_ids=ENDS, batch_size=8)
    events: list[int] = []
    answers = sample.generate(PROMPTS, 4, FREE, progress=events.append)
    assert sum(events) == 16
    ends = [
        max(len(a.tokens) for row in (answers[i] for i in pair) for a in row)
        for pair in ((1, 3), (0, 2))
    ]
    assert len(events) == sum(ends), "after each token, in two batches"
    assert 0 in events

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    model.train()
    with pytest.raises(KeyboardInterrupt):
        sample.generate(PROMPTS, 4, FREE, progress=stop)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("repeated", [1, 100], ids=["one pass", "several passes"])
def test_answers_are_measured_as_one_forward_measures_them(model: Any, repeated: int) -> None:
    answers = [(7, 8, 9, 10), (), (11,), (12, 13, 14, 15, 16, 17) * repeated]
    pairs = list(zip(PROMPTS, answers, strict=True))
    for temperature in (1.0, 0.6):
        result = generator(model).logps(pairs, temperature=temperature)
        assert [len(element) for element in result] == [4, 0, 1, 6 * repeated]
        for (prompt, answer), item in zip(pairs, result, strict=True):
            assert item == pytest.approx(
                oracle(model, prompt, answer, temperature) if answer else [], abs=2e-4
            )
    assert generator(model).logps([]) == []
    with raises_error("prompt-empty", where="prompt 1"):
        generator(model).logps([((4,), (5,)), ((), (5,))])


def test_what_was_sampled_is_measured_as_it_was_sampled() -> None:
    sample = generator(tiny(), end_ids=ENDS)
    for sampling in (FREE, GREEDY):
        rows = sample.generate(PROMPTS, 2, sampling)
        pairs = [(prompt, a.tokens) for prompt, row in zip(PROMPTS, rows, strict=True) for a in row]
        result = sample.logps(pairs, temperature=sampling.temperature)
        assert result == [pytest.approx(a.logps, abs=2e-4) for row in rows for a in row]
    sample.close()
