"""From a recipe to a prepared run: rows are read, tokenized, audited and checked.

No weights are loaded for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from valence.batching.kl_pairs import check_kl_pairs
from valence.config.load import LISTS, LoadedRecipe, Setting
from valence.config.messages import all_of
from valence.config.needs import method_in, other_text, reads_reference
from valence.config.schema import SELF, Data, ListName, Recipe, Rollout
from valence.data.audit import Audit, audit, overlap, shared_rows
from valence.data.encode import Encoder
from valence.data.encoded_set import CHAT_PROMPT, TEXT_PROMPT, EncodedSet
from valence.data.example_store import ExamplesById, ExampleStore
from valence.data.hindsight import TeacherContext
from valence.data.load import Loaded, load, load_split, sources_from
from valence.data.objects import Rows
from valence.data.sampler import Sampler, canonical_order
from valence.data.split import opening_key
from valence.data.targets import ONE, attribute_names, check_range, verdict, with_targets
from valence.data.template import with_template
from valence.data.tokenize import tokenize
from valence.data.tokenized_dataset import LazySequence, TokenizedDataset
from valence.errors import UserError
from valence.evaluation.forgetting import read_texts
from valence.methods import Method, method_of
from valence.models.build import (
    DTYPES,
    generation_stops,
    load_tokenizer,
    shared_vocabulary,
    stops_of,
)
from valence.models.loading import must_exist
from valence.models.memory import completions_per_batch
from valence.models.quantized import check_library
from valence.models.shape import Shape
from valence.reports.console import Progress
from valence.reports.verdict import HOLD_OUT, NO_ROWS, few_rows, rows_needed
from valence.rewards.build import check_rewards, may_return_feedback
from valence.rollouts.tools import Tools
from valence.targets import with_dtype
from valence.training.episodes import ToolUse
from valence.training.optim import check_optimizer, up
from valence.types import Chat, Content, TokenizedCompletion, TokenizedExample

MAX_PROCESSES = 1024
"""Of tools: more than the completions that are sampled at once."""

KEYS_CODES = ("keys-missing-column", "keys-unknown-column")
"""Mistakes in the ``keys`` of a file, which are often the same for all files of a recipe."""


@dataclass(frozen=True)
class Corpus:
    """One list of a recipe's data (train, eval or test): its rows, their tokens, and what was found
    in them.

    trained_origins: places of rows that are training rows too.
    """

    loaded: Loaded
    encoded: EncodedSet
    audit: Audit
    trained_origins: frozenset[str] = frozenset()

    @property
    def units(self) -> TokenizedDataset:
        return self.encoded.units

    @cached_property
    def examples(self) -> ExamplesById:
        """The examples by content id."""
        ids = self.encoded.audit_columns.columns["row_id"]
        return ExamplesById(self.loaded.examples, ids, self.encoded.turn_examples)


class _RepeatedPrompts(LazySequence[TokenizedExample]):
    """Each prompt with the same answers, ``num_repeats`` times in a row."""

    def __init__(
        self,
        prompts: Sequence[TokenizedExample],
        answers: tuple[TokenizedCompletion, ...],
        num_repeats: int,
    ) -> None:
        self._prompts, self._answers, self._num_repeats = prompts, answers, num_repeats

    def __len__(self) -> int:
        return len(self._prompts) * self._num_repeats

    def item(self, index: int) -> TokenizedExample:
        return replace(self._prompts[index // self._num_repeats], answers=self._answers)


@dataclass(frozen=True)
class AuxiliaryPart:
    """What `mix` adds to every step: a method and its examples.

    ``name``: of its numbers in the log.
    """

    name: str
    method: Method
    settings: Mapping[str, Any]
    weight: float
    sampler: Sampler


@dataclass(frozen=True)
class Prepared:
    """Everything of a run short of its weights.

    ``corpora``: train, eval, test, and mix.0.train and so on.
    """

    recipe: Recipe
    source: LoadedRecipe
    method: Method
    encoder: Encoder
    corpora: Mapping[str, Corpus]
    has_rewards: bool = True
    """Whether the recipe's rewards may be imported and called."""
    tool_use: ToolUse | None = None
    """How the policy uses tools; None without tools."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.encoder.tokenizer

    @property
    def uses_template(self) -> bool:
        """Whether the prompts of the run go through the chat template; without rows, whether plain
        text would.
        """
        if not self.encoder.template.exists:
            return False
        columns = [corpus.encoded.audit_columns for corpus in self.corpora.values()]
        if any(len(table.indices_with_flag(CHAT_PROMPT)) for table in columns):
            return True
        return self.encoder.as_chat and (
            not any(map(len, columns))
            or any(len(table.indices_with_flag(TEXT_PROMPT)) for table in columns)
        )

    @cached_property
    def shared_vocabulary(self) -> int | None:
        """Number of token ids that mean the same to the policy and to a teacher that is another
        model; None: there is no such teacher. Raises UserError.
        """
        name = self.recipe.teacher.model
        if name == SELF or self.recipe.teacher.is_served:
            return None  # a server is compared when the run starts
        remote = self.recipe.model.trust_remote_code
        theirs = load_tokenizer(name, trust_remote_code=remote, setting="teacher.model")
        rows = next((file.path for file in self.recipe.data.train), "FILE")
        imitate = (
            f"valence sample {name} --data {rows} --out answers.jsonl && "
            f"valence init answers.jsonl --model {self.recipe.model.name} --out sft.yaml && "
            "valence train sft.yaml"
        )
        return shared_vocabulary(self.tokenizer, theirs, name, imitate)

    @property
    def sampler(self) -> Sampler:
        train = self.recipe.train
        return Sampler(
            self.corpora["train"].units,
            train.batch_size,
            train.seed,
            train.drop_last,
            self.recipe.data.stratify,
        )

    @cached_property
    def mixed(self) -> tuple[AuxiliaryPart, ...]:
        """What `mix` adds to a step."""
        train, names = self.recipe.train, [part.method for part in self.recipe.mix]
        return tuple(
            AuxiliaryPart(
                part.method if names.count(part.method) == 1 else f"{part.method}{i}",
                method_of(part.method),
                part.loss,
                part.weight,
                Sampler(
                    self.corpora[_mix(i)].units, part.batch_size or train.batch_size, train.seed
                ),
            )
            for i, part in enumerate(self.recipe.mix)
        )

    @cached_property
    def planned(self) -> Sampler:
        """The steps of the run for estimates. Completions to be sampled have the maximum length."""
        if not self.method.online:
            return self.sampler
        rollout = self.recipe.rollout
        longest_completion = TokenizedCompletion(
            (0,) * rollout.max_new_tokens, (True,) * rollout.max_new_tokens
        )
        sides = 2 if self.method.loss.view == "pair" else 1
        if self.method.selects_best:
            num_repeats = rollout.top_n
        else:
            num_repeats = 1 if sides == 2 else rollout.num_rollouts
        units = _RepeatedPrompts(
            self.corpora["train"].units, (longest_completion,) * sides, num_repeats
        )
        return Sampler(
            units,
            num_repeats * -(-self.recipe.train.batch_size // rollout.steps),
            self.recipe.train.seed,
        )

    @property
    def has_separate_value_model(self) -> bool:
        """Whether a second model, rather than a head on the policy, predicts values."""
        return (
            self.method.online
            and bool(self.recipe.loss.get("value"))
            and self.recipe.value.trunk == "separate"
        )

    def rollouts(self, shape: Shape, device: torch.device) -> tuple[int, int, int] | None:
        """Completions per batch, and the longest prompt and completion, in tokens.

        None if this process does not sample.
        """
        rollout = self.recipe.rollout
        if not self.method.online or rollout.engine != "hf" or "train" not in self.corpora:
            return None
        at_once = self.completions_per_batch(shape, device)
        prompts = min(self.recipe.train.batch_size, max(1, at_once // rollout.num_rollouts))
        return prompts * rollout.num_rollouts, self._longest_prompt, rollout.max_new_tokens

    def completions_per_batch(self, shape: Shape, device: torch.device) -> int:
        """``rollout.at_once``, or its default for this model and device."""
        rollout = self.recipe.rollout
        if rollout.at_once is not None:
            return rollout.at_once
        tokens = self._longest_prompt + rollout.max_new_tokens
        if rollout.has_tools:  # the keys and values of conversations are kept between turns
            tokens *= 2
        width = DTYPES[self.recipe.model.dtype].itemsize
        return completions_per_batch(shape, tokens, width, device)

    @cached_property
    def _longest_prompt(self) -> int:
        """Tokens."""
        return max(int(c.units.prompt_column("num_tokens").max()) for c in self.corpora.values())

    @property
    def held_out(self) -> str:
        """How many rows are held out from the training rows; empty without data.eval as a share."""
        split = self.recipe.data.split
        if split is None or not {"train", "eval"} <= self.corpora.keys():
            return ""
        train, held_out = (
            sum(file.rows for file in self.corpora[name].loaded.files) for name in ("train", "eval")
        )
        return (
            f"held out by data.eval: {split.share:g}: {held_out:,} of {train + held_out:,} rows "
            f"({held_out / (train + held_out):.1%})"
        )

    @property
    def needs_reference(self) -> bool:
        return reads_reference(self.recipe)

    @property
    def evaluation_interval(self) -> int:
        """Optimizer steps from one evaluation to the next."""
        every = self.recipe.eval.every
        return round(every) if every >= 1 else max(1, round(every * self.steps_per_epoch))

    @property
    def measured_training_rows(self) -> list[TokenizedExample]:
        """The training rows that are measured after training, in the order of the data.

        ``eval.train_examples`` of them, drawn from all.
        """
        number = self.recipe.eval.train_examples
        if self.method.online or not number or "train" not in self.corpora:
            return []
        units = self.corpora["train"].units
        order = canonical_order(units, self.recipe.train.seed, 0)
        return [units[i] for i in sorted(order[:number])]

    def encoder_for(self, method: Method) -> Encoder:
        """The encoder of the rows of a method: that of the run, or of a part of `mix`."""
        return _encoder_for(method, self.encoder, self.recipe)

    def method_for(self, corpus: str) -> Method:
        """The method that reads the rows of a corpus."""
        return next(
            (method_of(part.method) for i, part in enumerate(self.recipe.mix) if corpus == _mix(i)),
            self.method,
        )

    def origins(self, ids: Sequence[str]) -> str:
        """Where training rows with these content ids are from, the first eight by name."""
        trained_on = (corpus for name, corpus in self.corpora.items() if name.endswith("train"))
        id_numbers = np.array([int(id, 16) for id in ids], np.uint64)
        origins = [
            str(units.origins[i])
            for units in (corpus.units for corpus in trained_on)
            for i in np.flatnonzero(np.isin(units.columns["id"], id_numbers)).tolist()
        ]
        more = f" and {len(origins) - 8} more" if len(origins) > 8 else ""
        return ", ".join(origins[:8]) + more

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one pass over the training rows: of a round of own answers those of
        all its passes.
        """
        rollout = self.recipe.rollout
        return self.sampler.steps_per_epoch * (rollout.steps_per_round if self.method.online else 1)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        train = self.recipe.train
        return self.num_steps(train.epochs, train.max_steps)

    def num_steps(self, epochs: float, max_steps: int | None) -> int:
        """Optimizer steps of the whole run with this length."""
        if max_steps is not None:
            return max_steps
        if not self.method.online:
            return up(epochs * self.steps_per_epoch)
        rows, batch_size = len(self.corpora["train"].units), self.recipe.train.batch_size
        # rounds do not end with an epoch
        return up(epochs * rows / batch_size) * self.recipe.rollout.steps_per_round


def prepare(
    source: LoadedRecipe,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    rows: Mapping[str, Rows | None] | None = None,
    policy: Any = None,
    rewards: bool = True,
    tools: bool | None = None,
    training: bool = False,
    console: Console | None = None,
) -> Prepared:
    """Read, encode and audit all rows of a recipe.

    rows: rows in memory that replace the recipe's train or eval files. policy: a model that
    replaces the recipe's, for the tokens at which it stops. rewards: False leaves the recipe's
    reward functions out; nothing of them is imported, and they cannot be called later. tools:
    whether its tools may be imported and called; by default as the rewards. training:
    whether the run is to be trained; otherwise its optimizer is not imported. console: for the
    progress of tokenization. Raises UserError for a mistake in the recipe or the data.
    """
    with source.placing():
        source = with_dtype(source)
        recipe = source.recipe
        model, data = recipe.model, recipe.data
        method = method_in(recipe)
        method.check(recipe.loss)
        for i, part in enumerate(recipe.mix):
            method_of(part.method).check(part.loss, f"mix.{i}.method")
        if tokenizer is None:
            tokenizer = load_tokenizer(
                model.tokenizer or model.name,
                gguf_file=None if model.tokenizer else model.gguf_file,
                trust_remote_code=model.trust_remote_code,
                setting="model.tokenizer" if model.tokenizer else "model.name",
            )
        tokenizer = with_template(tokenizer, data.chat_template)
        encoder_options: dict[str, Any] = {
            "long_rows": data.long_rows,
            "train_on": data.train_on,
            "as_chat": data.as_chat,
            "chat_template_kwargs": data.chat_template_kwargs,
            "stop_ids": _stop_ids(recipe, policy),
        }
        may_call = rewards if tools is None else tools
        named = tools_of(recipe.rollout) if may_call and recipe.rollout.has_tools else None
        encoder_options["tools"] = named.schemas if named is not None else ()
        answers = recipe.rollout.max_new_tokens if method.online else 0
        _check_room(data.max_length, answers)
        encoder = Encoder(tokenizer, max_length=data.max_length, answers=answers, **encoder_options)
        encoder = _encoder_for(method, encoder, recipe)
        tool_use = named and ToolUse.of(encoder, named, recipe.rollout.max_turns)
        if data.as_chat == "auto":
            why = (
                "the tokenizer has a chat template"
                if encoder.as_chat
                else "the tokenizer has no chat template"
            )
            source = source.with_automatic("data.as_chat", encoder.as_chat, why)
        corpora: dict[str, Corpus] = {}
        wrong_keys: list[UserError] = []
        for name in LISTS:
            try:
                corpora |= _read_list(name, rows or {}, method, data, encoder, console)
            except UserError as error:
                if error.code not in KEYS_CODES and not wrong_keys:
                    raise
                wrong_keys += (
                    [_placed_at_keys(error, name, source)] if error.code in KEYS_CODES else []
                )
            if name in corpora and name != "train" and "train" in corpora:
                corpora[name] = _compared(corpora[name], corpora["train"])
        if wrong_keys:
            raise all_of(wrong_keys, source.settings["method"].origin.split(":")[0])
        if named is not None:
            _check_row_tools(named, corpora)
        leave_out = _is_held_out(corpora["eval"]) if data.split and "eval" in corpora else None
        for i, part in enumerate(recipe.mix if "train" in corpora else ()):
            part_method = method_of(part.method)
            part_encoder = Encoder(tokenizer, max_length=data.max_length, **encoder_options)
            part_data = data.model_copy(
                update={"convert": part.convert, "threshold": part.threshold}
            )
            corpora[_mix(i)] = read_corpus(
                part.train,
                part_method,
                part_data,
                _encoder_for(part_method, part_encoder, recipe),
                console,
                leave_out=leave_out,
            )
        corpora = {
            name: _with_advice(corpus, source.recipe, name) for name, corpus in corpora.items()
        }
        source = _named(_balanced(source, corpora), corpora)
        if method.kind == "scored":
            corpora = {
                name: _with_targets(corpus, source.recipe) for name, corpus in corpora.items()
            }
        prepared = Prepared(source.recipe, source, method, encoder, corpora, rewards, tool_use)
        _check(prepared, training=training)
        return prepared


def tools_of(rollout: Rollout) -> Tools:
    """The tools of a recipe. Raises UserError for one that cannot be imported or described."""
    return Tools(
        rollout.functions,
        rollout.environment,
        timeout=rollout.tool_timeout,
        max_output=rollout.tool_output,
        max_processes=MAX_PROCESSES,
    )


def _check_row_tools(tools: Tools, corpora: Mapping[str, Corpus]) -> None:
    """Raise UserError for a prompt that shows a tool which the run cannot call."""
    for corpus in corpora.values():
        for example in corpus.loaded.examples:
            listed = example.prompt.tools if isinstance(example.prompt, Chat) else ()
            names = [str(tool.get("function", tool).get("name")) for tool in listed]
            if unknown := [name for name in names if name not in tools.names]:
                raise UserError(
                    f"the row has the tool {unknown[0]!r}, which the run cannot call (its tools: "
                    f"{', '.join(tools.names)})",
                    code="tool-of-row-unknown",
                    where=str(example.origin),
                    fix="add it to rollout.tools, or remove it from the row",
                )


def _read_list(
    name: ListName,
    rows: Mapping[str, Rows | None],
    method: Method,
    data: Data,
    encoder: Encoder,
    console: Console | None,
) -> dict[str, Corpus]:
    """The rows of a list by its name; with training rows also those that are held out from them.

    rows: rows in memory that replace those of files.
    """
    in_memory = rows.get(name)
    if in_memory is None and not data.files(name):
        return {}
    list_rows = data.files(name) if in_memory is None else in_memory
    if name != "train" or data.split is None:
        return {name: read_corpus(list_rows, method, data, encoder, console)}
    options = _loading_options(data)
    parts = load_split(
        sources_from(list_rows), method.kind, data.split, where="data.eval", **options
    )
    return {
        part: _corpus(loaded, data, encoder, console)
        for part, loaded in zip(("train", "eval"), parts, strict=True)
    }


def _encoder_for(method: Method, encoder: Encoder, recipe: Recipe) -> Encoder:
    """The encoder, with the prompts of the teacher if the method has one."""
    if method.loss.data != "feedback":
        return encoder
    return encoder.with_teacher(TeacherContext(recipe.teacher.context, recipe.teacher.template))


def _is_held_out(held_out: Corpus) -> Callable[[Content], bool]:
    """Whether the conversation of a prompt has rows that are held out."""
    keys = {opening_key(example.prompt) for example in held_out.loaded.examples}
    return lambda prompt: opening_key(prompt) in keys


def _placed_at_keys(error: UserError, name: ListName, source: LoadedRecipe) -> UserError:
    """A mistake in the ``keys`` of a file, with the place where the recipe sets them."""
    for index, file in enumerate(source.recipe.data.files(name)):
        keys = f"data.{name}.{index}.keys"
        if file.path == error.where and keys in source.settings:
            where = f"{source.settings[keys].origin} ({keys})"
            return UserError(
                f"{error.where}: {error.message}", code=error.code, where=where, fix=error.fix
            )
    return error


def _stop_ids(recipe: Recipe, policy: Any) -> tuple[int, ...]:
    """Tokens at which the model stops, by its generation config."""
    if policy is not None:
        return stops_of(getattr(policy, "generation_config", None) or policy.config)
    model = recipe.model
    return generation_stops(
        model.name, gguf_file=model.gguf_file, trust_remote_code=model.trust_remote_code
    )


def _check_room(max_length: int, answers: int) -> None:
    """Raises UserError when answers of ``answers`` tokens leave no room for their prompts."""
    if max_length - answers < 1:
        message = (
            f"rollout.max_new_tokens: {answers} leaves no room for a prompt in {max_length} tokens"
        )
        raise UserError(
            message,
            code="max-length-too-small",
            where="data.max_length",
            fix="raise it, or lower rollout.max_new_tokens",
        )


def _balanced(source: LoadedRecipe, corpora: Mapping[str, Corpus]) -> LoadedRecipe:
    """The recipe with every `class_weights: auto` replaced by the weights that the training rows
    ask for.
    """
    recipe, settings = source.recipe, dict(source.settings)
    if "train" in corpora and recipe.loss.get("class_weights") == "auto":
        class_weights = _weights(recipe.method, corpora["train"].units)
        recipe = recipe.model_copy(update={"loss": recipe.loss | class_weights})
        settings |= {
            f"loss.{name}": Setting(value, "loss.class_weights: auto", False)
            for name, value in class_weights.items()
        }
    mix = [
        part.model_copy(update={"loss": part.loss | _weights(part.method, corpora[_mix(i)].units)})
        if part.loss.get("class_weights") == "auto" and _mix(i) in corpora
        else part
        for i, part in enumerate(recipe.mix)
    ]
    for i, part in enumerate(mix):
        if part is not recipe.mix[i]:
            settings[f"mix.{i}.loss"] = Setting(part.loss, "loss.class_weights: auto", False)
    return LoadedRecipe(recipe.model_copy(update={"mix": mix}), settings)


def _with_advice(corpus: Corpus, recipe: Recipe, name: str) -> Corpus:
    """With advice on the class weights of the recipe, only where the recipe could follow it."""
    from valence.data.audit import advised_weights

    loss, weights = _loss_of(recipe, name), corpus.audit.weights
    if weights is not None:
        weights = (
            advised_weights(
                weights.n_up, weights.n_down, loss["desirable_weight"], loss["undesirable_weight"]
            )
            if loss.get("class_weights") == "given"
            else None
        )
    return replace(corpus, audit=replace(corpus.audit, weights=weights))


def _weights(method: str, units: TokenizedDataset) -> dict[str, Any]:
    """Settings of a loss in place of `class_weights: auto`."""
    balances = method_of(method).loss.balances
    assert balances is not None
    ups = int((units.columns["label"] == 1).sum())
    up, down = balances(ups, len(units) - ups)
    return {"class_weights": "given", "desirable_weight": up, "undesirable_weight": down}


def _named(source: LoadedRecipe, corpora: Mapping[str, Corpus]) -> LoadedRecipe:
    """The recipe of a reward model with what it learns of a row, and the names of what it
    scores.
    """
    recipe = source.recipe
    if not method_in(recipe).is_reward_model or not corpora:
        return source
    units = corpora.get("train", next(iter(corpora.values()))).units
    kind = recipe.loss.get("verdict", "score")
    if kind == "auto":
        first = recipe.loss["error"] == "cross_entropy"
        kind = verdict(
            units, ("label", "score", "attributes") if first else ("score", "attributes", "label")
        )
    names = recipe.model.attributes or list(attribute_names(units) if kind == "attributes" else ONE)
    if kind != "attributes" and len(names) > 1:
        message = (
            f"{recipe.method} learns one score per answer from these rows, but model.attributes "
            f"lists {len(names)} names"
        )
        raise UserError(
            message,
            code="attributes-unused",
            where="model.attributes",
            fix="remove model.attributes",
        )
    loss = recipe.loss | ({"verdict": kind} if "verdict" in recipe.loss else {})
    resolved = {"model.attributes": names, **({"loss.verdict": kind} if "verdict" in loss else {})}
    settings = {
        **source.settings,
        **{name: Setting(value, "the rows", False) for name, value in resolved.items()},
    }
    model = recipe.model.model_copy(update={"attributes": names})
    return LoadedRecipe(recipe.model_copy(update={"model": model, "loss": loss}), settings)


def _with_targets(corpus: Corpus, recipe: Recipe) -> Corpus:
    """Rows of a reward model that learns from single answers."""
    levels, error = recipe.loss.get("levels"), recipe.loss.get("error")
    units = with_targets(
        corpus.units, recipe.loss.get("verdict", "score"), recipe.model.attributes or ONE
    )
    if levels:
        message = f"{recipe.method} needs whole numbers from 1 to {levels} (loss.levels)"
        fix = (
            "number the ratings from 1, and set loss.levels to the largest; or set method: "
            "pointwise and loss.error: squared"
        )
        check_range(units, 1, levels, True, message, fix)
    elif error == "cross_entropy":
        message = "loss.error: cross_entropy needs labels, or probabilities from 0 to 1"
        check_range(units, 0, 1, False, message, "set loss.error: squared or huber")
    return replace(corpus, encoded=replace(corpus.encoded, units=units))


def rows_to_measure(prepared: Prepared, rows: Rows) -> Corpus:
    """Rows in memory as a run's own are read and checked.

    Raises UserError for a mistake in them.
    """
    corpus = read_corpus(rows, prepared.method, prepared.recipe.data, prepared.encoder)
    if prepared.method.kind == "scored":
        corpus = _with_targets(corpus, prepared.recipe)
    _check_columns(prepared.method, corpus.units)
    return corpus


def read_corpus(
    rows: Any,
    method: Method,
    data: Data,
    encoder: Encoder,
    console: Console | None = None,
    *,
    leave_out: Callable[[Content], bool] | None = None,
) -> Corpus:
    """Rows of files (``Source`` sections or paths) or in memory, as examples of the method's kind,
    as tokens, audited. leave_out: rows with such a prompt are not used.
    """
    loaded = load(sources_from(rows), method.kind, leave_out=leave_out, **_loading_options(data))
    return _corpus(loaded, data, encoder, console)


def _loading_options(data: Data) -> dict[str, Any]:
    """The settings of ``load`` and ``load_split``."""
    names = ("convert", "threshold", "top_n", "mask_truncated", "limit", "on_bad_row")
    return {name: getattr(data, name) for name in names}


def _corpus(loaded: Loaded, data: Data, encoder: Encoder, console: Console | None) -> Corpus:
    """Examples as tokens, audited. Raises UserError for a bad row if the recipe stops at one."""
    encoded = _tokenize(encoder, loaded.examples, console)
    bad = [row for row in encoded.unusable if not row.dropped]
    if bad and data.on_bad_row == "stop":
        raise UserError(
            bad[0].reason,
            code=bad[0].code,
            where=str(bad[0].origin),
            fix=_bad_row_remedy(bad[0].fix),
        )
    if not len(encoded.units):
        raise UserError(
            f"none of the {len(loaded.examples)} rows can be used; the first one: "
            f"{encoded.unusable[0].reason}",
            code="no-usable-rows",
            where=str(encoded.unusable[0].origin),
            fix=encoded.unusable[0].fix or "see the audit (`valence check RECIPE`)",
        )
    return Corpus(loaded, encoded, audit(loaded, encoded, encoder))


def _tokenize(encoder: Encoder, examples: ExampleStore, console: Console | None) -> EncodedSet:
    """Tokenize the examples and show progress."""
    if console is None:
        return tokenize(encoder, examples)
    with Progress(console, "tokenizing", len(examples), brief=True) as bar:
        return tokenize(
            encoder,
            examples,
            lambda num_examples, num_tokens: bar.update(num_examples, tokens=num_tokens),
        )


def _compared(corpus: Corpus, train: Corpus) -> Corpus:
    """The same with the rows that are trained on, also as findings of the audit."""
    columns = train.encoded.audit_columns, corpus.encoded.audit_columns
    return replace(
        corpus,
        audit=replace(corpus.audit, findings={**corpus.audit.findings, **overlap(*columns)}),
        trained_origins=frozenset(map(str, shared_rows(*columns))),
    )


def _bad_row_remedy(fix: str | None) -> str:
    skip = "`data.on_bad_row: skip` leaves such rows out, counts and lists them"
    return f"{fix}; {skip}" if fix else skip


def _check(prepared: Prepared, *, training: bool) -> None:
    """Raise UserError for what can be known to fail before a model is loaded.

    training: also import and check the optimizer that the recipe names.
    """
    recipe = prepared.recipe
    for setting, named in (
        ("model.adapter", recipe.model.adapter),
        recipe.reference_model,
    ):
        if named:
            must_exist(named, setting)
    if prepared.has_rewards:
        check_rewards(recipe.reward)
        has_teacher = prepared.method.online and prepared.encoder.teacher is not None
        needs_feedback = has_teacher and recipe.teacher.context == "feedback"
        if needs_feedback and not may_return_feedback(recipe.reward):
            raise UserError(
                "the teacher reads texts of the reward, but rules and reward models return only "
                "numbers",
                code="setting-conflict",
                where="teacher.context",
                fix="set it to demonstration, or add a reward that returns text: a function, a "
                "server or a judge",
            )
    if training:
        check_optimizer(recipe)
        if (path := other_text(recipe)) is not None:
            read_texts(path)
    if recipe.model.quantize:
        check_library()
    cache = recipe.reference.cache
    if cache not in ("auto", "off") and Path(cache).exists() and not Path(cache).is_dir():
        raise UserError(
            f"{cache} is a file",
            code="path-is-file",
            where="reference.cache",
            fix="choose a new or existing folder",
        )
    _check_rows(prepared)


def _check_rows(prepared: Prepared) -> None:
    """Raise UserError for rows that the methods cannot train on."""
    recipe = prepared.recipe
    for name, corpus in prepared.corpora.items():
        method = prepared.method_for(name)
        _check_columns(method, corpus.units)
        if method.loss.needs_teacher:
            _check_tokens(corpus.units, prepared.shared_vocabulary, recipe.teacher.model)
        if name.endswith("train") and not corpus.units.columns["weight"].any():
            raise UserError(
                "all rows have weight 0",
                code="rows-weight-zero",
                where=str(corpus.units[0].origin),
                fix="set a weight above 0 for some of them",
            )
        if (
            method.needs_kl_pairs
            and not method.online
            and _loss_of(recipe, name)["z0_scope"] == "step"
        ):
            max_examples = prepared.recipe.eval.max_examples if name == "eval" else None
            units = corpus.units
            check_kl_pairs(
                units.prompt_column("digest")[:max_examples],
                units.answer_column("digest")[:max_examples],
                units.origins,
            )
    if "train" in prepared.corpora and prepared.steps_per_epoch == 0:
        raise UserError(
            f"all {len(prepared.corpora['train'].units)} rows are dropped, because they do "
            f"not fill one step of train.batch_size: {prepared.recipe.train.batch_size}",
            code="step-larger-than-data",
            where="train.drop_last",
            fix="set train.drop_last: false, or a smaller train.batch_size",
        )


def _check_tokens(units: TokenizedDataset, shared: int | None, teacher: str) -> None:
    """Raise UserError for a row with a token that the teacher does not have."""
    if shared is None:
        return
    for unit in units:
        tokens = [unit.prompt_ids, *(answer.ids for answer in unit.answers)]
        if (largest := max(max(ids, default=0) for ids in tokens)) >= shared:
            raise UserError(
                f"this row has the token {largest}, and the teacher {teacher} shares only the "
                f"tokens below {shared} with the model",
                code="vocabulary-mismatch",
                where=str(unit.origin),
                fix="remove the row, or use a teacher with the same added tokens",
            )


def _mix(i: int) -> str:
    return f"mix.{i}.train"


def _loss_of(recipe: Recipe, corpus: str) -> Mapping[str, Any]:
    return next((part.loss for i, part in enumerate(recipe.mix) if corpus == _mix(i)), recipe.loss)


def _check_columns(method: Method, units: TokenizedDataset) -> None:
    """Raise UserError for the first row with a column that the method does not read."""
    soft = units.columns["soft"]
    for column, reads, has_column in (
        ("margin", "margin", units.columns["margin"] != 0),
        ("soft label", "wrong", ~np.isnan(soft)),
    ):
        if has_column.any() and reads not in method.loss.reads:
            raise UserError(
                f"the row has a {column}, which {method.name} does not read",
                code="row-column-unused",
                where=str(units.origins[int(has_column.argmax())]),
                fix="remove the column, or use a method that reads it (dpo)",
            )
    is_even = soft == 0.5
    if is_even.any() and method.name == "robust_dpo":  # it divides by 1 - 2e
        raise UserError(
            "a soft label of 0.5 expresses no preference, and robust_dpo would divide by 0",
            code="row-soft-label-even",
            where=str(units.origins[int(is_even.argmax())]),
            fix="remove the row",
        )


def class_weight_warning(prepared: Prepared) -> str | None:
    """What to say when class weights that the recipe sets leave the range that the KTO paper
    advises, else None.

    At the default weights the audit of the training rows says what is advised.
    """
    settings = prepared.recipe.loss
    defaults = [
        name
        for name, s in prepared.source.settings.items()
        if name.endswith("desirable_weight") and not s.is_default
    ]
    if not defaults or "train" not in prepared.corpora:
        return None
    from valence.data.audit import advised_weights

    labels = prepared.corpora["train"].units.columns["label"]
    ups = int((labels == 1).sum())
    downs = len(labels) - ups
    return advised_weights(
        ups, downs, settings["desirable_weight"], settings["undesirable_weight"]
    ).warning


MAX_SHARE = 0.5
"""The largest share of the rows that a warning advises to hold out."""


def held_out_warning(prepared: Prepared) -> str | None:
    """What to say before training if held-out rows are missing for a verdict; else None."""
    if "train" not in prepared.corpora:
        return None
    if "eval" not in prepared.corpora:
        return f"{NO_ROWS} {HOLD_OUT}"
    corpus = prepared.corpora["eval"]
    units, limit = corpus.units, prepared.recipe.eval.max_examples
    is_new = [str(origin) not in corpus.trained_origins for origin in units.origins[:limit]]
    rows = np.flatnonzero(is_new)
    if not len(rows):
        return "All held-out rows are also training rows, so they show nothing. " + HOLD_OUT
    labels = units.columns["label"][rows]
    labels = labels[labels >= 0]
    if len(labels):
        share = float(labels.mean())
        if share in (0.0, 1.0):
            name = "up" if share else "down"
            return f"All held-out rows are thumbs {name}, so there is nothing to compare them with."
        return _few(prepared, len(labels), rows_needed(share))
    if units.has_kind("preference")[rows].any():
        return _few(prepared, len(rows), rows_needed(None))
    return None


def _few(prepared: Prepared, num_rows: int, needed: int) -> str | None:
    """The warning if fewer rows are held out than are needed, with what to do about it."""
    if not (sentence := few_rows(num_rows, needed)):
        return None
    total = sum(len(prepared.corpora[name].units) for name in ("train", "eval"))
    share = math.ceil(10 * needed / total) / 10
    if share <= MAX_SHARE and prepared.recipe.data.split is not None:
        return f"{sentence} Set data.eval: {share:g}."
    return f"{sentence} Collect more rows: {needed} to measure, and others to train on."
