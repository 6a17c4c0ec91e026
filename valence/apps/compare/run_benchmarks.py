"""Evaluate models on tasks of lm-eval, the LM Evaluation Harness.

The result of each task and model is one file in the folder ``lm_eval`` of a comparison. A finished
one is not computed again.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
import random
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from valence.apps.compare.benchmarks import ADDRESS, BenchmarkResult, compare_results
from valence.config.load import LISTS
from valence.distributed.process_group import SingleProcess
from valence.errors import UserError, install_command, refuse_unused
from valence.jobs.row_job import replace_file
from valence.jobs.sample_rows import model_files
from valence.models.digest import model_digest
from valence.network import hub_problem
from valence.options import CompareOptions, changed_options
from valence.reports.console import Progress
from valence.storage import add_checksum, read_json, verify
from valence.targets import load_target
from valence.terminal import print_message
from valence.training.open_run import open_run
from valence.training.prepare import prepare
from valence.training.saved_models import At
from valence.training.trainer import Trainer
from valence.types import content_id

FOLDER, LOG = "lm_eval", "log.txt"
OPTION = "--lm-eval-tasks"
BATCH_SIZE = 8
"""Sequences that are computed at once, by default."""
UNREPEATED = ("arguments", "resps")
"""Parts of a sample that are not stored: prompts with their examples, once for each answer."""


SEEDS = {"random_seed": 0, "numpy_seed": 1234, "torch_seed": 1234, "fewshot_seed": 1234}
"""Those of lm-eval."""


@dataclass(frozen=True)
class BenchmarkTasks:
    """Tasks of lm-eval, and how to ask them.

    names: of tasks, groups or tags, also with wildcards, or YAML files. include: folders with YAML
    files of more tasks. num_fewshot: examples before each question; None: as the task says. limit:
    the first questions of each task; None: all. as_chat: whether questions become user messages of
    the chat template; None: if plain-text prompts of both models do.
    """

    names: tuple[str, ...]
    include: tuple[Path, ...] = ()
    num_fewshot: int | None = None
    limit: int | None = None
    as_chat: bool | None = None


def tasks_of(options: CompareOptions) -> BenchmarkTasks | None:
    """The tasks of lm-eval that the options name. Raises UserError for options without effect."""
    if options.lm_eval_tasks is None:
        names = ("lm_eval_include", "lm_eval_fewshot", "lm_eval_limit", "lm_eval_chat")
        unused = changed_options(options, *names)
        refuse_unused(unused, "without --lm-eval-tasks", "add --lm-eval-tasks")
        return None
    return BenchmarkTasks(
        names=tuple(filter(None, map(str.strip, options.lm_eval_tasks.split(",")))),
        include=tuple(options.lm_eval_include),
        num_fewshot=options.lm_eval_fewshot,
        limit=options.lm_eval_limit,
        as_chat=options.lm_eval_chat,
    )


@dataclass(frozen=True)
class ComparedModel:
    """A side of the comparison. at: checkpoint of a run."""

    side: str
    target: str
    at: At


def check_benchmarks(tasks: BenchmarkTasks) -> None:
    """Raise UserError for missing libraries or files, before anything is loaded."""
    if find_spec("lm_eval") is None:
        raise UserError(
            "lm_eval is not installed",
            code="library-missing",
            where=OPTION,
            fix=install_command("lm-eval"),
        )
    if not tasks.names:
        raise UserError(
            "there are no tasks",
            code="benchmark-missing",
            where=OPTION,
            fix="name tasks of lm-eval, separated by commas",
        )
    for folder in tasks.include:
        if not folder.is_dir():
            raise UserError(
                "this folder does not exist",
                code="path-missing",
                where=f"--lm-eval-include {folder}",
                fix="pass a folder with YAML files of tasks",
            )


def run_benchmarks(
    tasks: BenchmarkTasks,
    models: Sequence[ComparedModel],
    folder: Path,
    *,
    batch_size: int = BATCH_SIZE,
    overrides: Sequence[str] = (),
    console: Console,
) -> list[BenchmarkResult]:
    """Evaluate two models on tasks, and compare their results.

    folder: of the results. An interrupted call is resumed with the first task that has no result. A
    result is reused if the task, its questions, the options, the libraries and the files of the
    model are the same.

    Raises UserError for unknown tasks and tasks that fail.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _redirected_output(folder / LOG, console):
        print_message(console, "lm-eval: loading tasks")
        suite = load_suite(tasks, folder / LOG)
        is_chat = _asks_as_chat(tasks.as_chat, models, overrides)
        form = "with the chat template" if is_chat else "as plain text"
        print_message(console, f"lm-eval: questions are asked {form}")
        contents = [
            ModelBenchmarks(
                suite, model, folder, is_chat, batch_size, list(overrides), console
            ).evaluate()
            for model in models
        ]
    return compare_results(contents[0], contents[1], str(folder))


@contextmanager
def _redirected_output(path: Path, console: Console) -> Iterator[None]:
    """Inside the block, the output of libraries goes to a file; that of the console does not."""
    previous = console._file
    with path.open("a", encoding="utf-8", errors="backslashreplace") as log:
        console.file = console.file  # otherwise it follows the standard streams
        logger, handler = logging.getLogger("lm_eval"), logging.StreamHandler(log)
        logger.addHandler(handler)
        try:
            with redirect_stdout(log), redirect_stderr(log):
                yield
        finally:
            logger.removeHandler(handler)
            console._file = previous


# Tasks


@dataclass(frozen=True)
class Suite:
    """Loaded tasks.

    names: as they are passed to lm-eval. digests: of the settings and questions of each. manager:
    the TaskManager of lm-eval. log: the output of libraries.
    """

    names: tuple[str, ...]
    digests: Mapping[str, str]
    manager: Any
    options: BenchmarkTasks
    version: str
    log: Path


def load_suite(tasks: BenchmarkTasks, log: Path) -> Suite:
    """Find the tasks, and load their questions. Raises UserError if that fails."""
    import lm_eval
    from datasets import config
    from huggingface_hub import constants
    from lm_eval.tasks import TaskManager

    problem = "its questions cannot be loaded"
    if not config.HF_HUB_OFFLINE and (reason := hub_problem()):
        # libraries would retry for a minute; local and downloaded questions need no hub
        config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
        problem += f", and {constants.ENDPOINT} cannot be reached: {reason}"
    include: list[str | Path] = [*tasks.include]
    manager = TaskManager(include_path=include or None, include_defaults=not include)
    if include and not all(_matches(item, manager) for item in tasks.names):
        # with an index of the tasks of lm-eval, which takes 10 s
        manager = TaskManager(include_path=include)
    for item in tasks.names:
        if not _matches(item, manager):
            close = get_close_matches(item, manager.all_tasks)
            raise UserError(
                f"lm-eval has no task {item!r}",
                code="benchmark-unknown",
                where=OPTION,
                fix=f"use {' or '.join(close)}"
                if close
                else "run `lm-eval ls tasks` for a list, or name the folder of your task with "
                "--lm-eval-include",
            )
    names = list(dict.fromkeys(name for item in tasks.names for name in _matches(item, manager)))
    digests: dict[str, str] = {}
    for name in names:
        with _explained(name, problem, log):
            loaded = _load(manager, name, tasks.num_fewshot)
            digests[name] = _digest(loaded["tasks"], tasks.limit)
    return Suite(tuple(names), digests, manager, tasks, lm_eval.__version__, log)


def _load(manager: Any, name: str, num_fewshot: int | None) -> Any:
    """Load a task, or those of a group, with the examples that are asked for.

    Raises UserError for a task that is asked without examples.
    """
    loaded = manager.load([name])
    for task_name, task in loaded["tasks"].items():
        of_task = task.get_config("num_fewshot")
        if num_fewshot and of_task == 0:
            raise UserError(
                "the task has no examples before its questions (num_fewshot: 0)",
                code="benchmark-option",
                where=f"--lm-eval-fewshot, {task_name}",
                fix="remove the option, or evaluate this task in another folder",
            )
        task.set_config("num_fewshot", (of_task or 0) if num_fewshot is None else num_fewshot)
        task.set_fewshot_seed(seed=SEEDS["fewshot_seed"])
    return loaded


def set_seeds() -> None:
    random.seed(SEEDS["random_seed"])
    np.random.seed(SEEDS["numpy_seed"])
    torch.manual_seed(SEEDS["torch_seed"])


def _matches(item: str, manager: Any) -> list[str]:
    """Names of tasks that an entry of the option stands for."""
    if Path(item).suffix in (".yaml", ".yml") and Path(item).is_file():
        return [item]
    return list(manager.match_tasks([item]))


def _digest(tasks: Mapping[str, Any], limit: int | None) -> str:
    """The same for the same settings and questions."""
    digest = hashlib.sha256()
    for name, task in sorted(tasks.items()):
        settings = json.dumps([name, task.VERSION, task.dump_config()], default=str)
        digest.update(ADDRESS.sub("", settings).encode())
        for _, question in task.doc_iterator(limit=limit):
            digest.update(json.dumps(question, default=str).encode())
    return digest.hexdigest()[:16]


@contextmanager
def _explained(task: str, problem: str, log: Path) -> Iterator[None]:
    """Raise UserError for an error of lm-eval, or of the code of a task."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # tasks contain code, and lm-eval calls many libraries
        traceback.print_exc()
        message = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{problem} ({type(error).__name__}: {message})",
            code="benchmark-failed",
            where=f"{OPTION} {task}",
            fix=f"fix the task or leave it out; {log} has the traceback",
        ) from error


def _asks_as_chat(
    requested: bool | None, models: Iterable[ComparedModel], overrides: Sequence[str]
) -> bool:
    """Whether both models are asked with their chat templates. Raises UserError."""
    encoders = {
        model.side: prepare(
            load_target(model.target, _without_rows(overrides)), rewards=False
        ).encoder
        for model in models
    }
    without = [side for side, encoder in encoders.items() if not encoder.template.exists]
    if requested and without:
        raise UserError(
            f"the {without[0]} has no chat template",
            code="chat-template-missing",
            where="--lm-eval-chat",
            fix="use --no-lm-eval-chat, or add data.chat_template=chatml",
        )
    if requested is not None:
        return requested
    plain = [side for side, encoder in encoders.items() if not encoder.as_chat]
    if len(plain) == 1:
        raise UserError(
            f"the {plain[0]} is prompted as plain text, the other model with its chat template",
            code="benchmarks-differ",
            where=OPTION,
            fix="use --no-lm-eval-chat or --lm-eval-chat, for both models",
        )
    return not plain


def _without_rows(overrides: Sequence[str]) -> list[str]:
    return [*(f"data.{name}=[]" for name in LISTS), *overrides]


# Results


@dataclass(frozen=True)
class ModelBenchmarks:
    """The results of one model."""

    suite: Suite
    model: ComparedModel
    folder: Path
    is_chat: bool
    batch_size: int
    overrides: list[str]
    console: Console

    def evaluate(self) -> dict[str, Any]:
        """The results of all tasks, as lm-eval returns those of one call."""
        target, at = self.model.target, self.model.at
        key = model_files(target, load_target(target, _without_rows(self.overrides)), at)
        results = {} if key is None else self._stored(key)
        missing = [name for name in self.suite.names if name not in results]
        if missing:
            print_message(self.console, f"lm-eval: loading {target}")
            run = open_run(
                target,
                self.overrides,
                group=SingleProcess(),
                at=at,
                console=self.console,
                tools=False,
            )
            if run.prepared.method.is_reward_model:
                raise UserError(
                    "reward models have no answers to evaluate",
                    code="reward-model-cannot-generate",
                    where=target,
                    fix="use a language model",
                )
            if key is None:
                key = model_digest(run.policy, adapter=True)
                results = self._stored(key)
                missing = [name for name in missing if name not in results]
            for name in missing:
                results[name] = self._run(run, name)
                content = json.dumps(add_checksum(results[name]), indent=1)
                replace_file(self._path(name, key), content)
        if len(missing) < len(self.suite.names):
            total, number = len(self.suite.names), len(self.suite.names) - len(missing)
            message = f"{self.model.side}: {number} of {total} results are from an earlier call"
            print_message(self.console, message)
        return _merged(results[name] for name in self.suite.names)

    def _path(self, name: str, key: str) -> Path:
        """The file of a result, whose name changes with all that the result depends on."""
        options = self.suite.options
        id = content_id(
            [key, self.suite.version, torch.__version__, self.suite.digests[name]],
            [options.num_fewshot, options.limit, self.is_chat, self.batch_size],
        )
        stem = re.sub(r"[^\w.-]+", "_", name)[-100:]
        return self.folder / f"{self.model.side}.{stem}.{id[:8]}.json"

    def _stored(self, key: str) -> dict[str, Any]:
        """The results of earlier calls. A damaged file is reported, and not used."""
        results: dict[str, Any] = {}
        for name in self.suite.names:
            path = self._path(name, key)
            try:
                results[name] = verify(read_json(path), required=True)
            except FileNotFoundError:
                continue
            except (OSError, ValueError, AttributeError) as error:
                message = f"{path} is damaged ({error}): {name} is evaluated again"
                print_message(self.console, message, "yellow")
        return results

    def _run(self, run: Trainer, name: str) -> dict[str, Any]:
        """Evaluate one task. Raises UserError if it fails."""
        import lm_eval

        evaluate: Any = lm_eval.evaluate
        policy, options = run.policy, self.suite.options
        with (
            run.state.evaluation_weights(),
            policy.sampling(),
            _explained(name, "lm-eval cannot evaluate this task", self.suite.log),
        ):
            model = policy_for_lm_eval(
                run, self.batch_size, f"{name} ({self.model.side})", self.console
            )
            try:
                # `simple_evaluate` does the same, and reports on the machine for 3 s
                set_seeds()
                result: Any = evaluate(
                    lm=model,
                    task_dict=_load(self.suite.manager, name, options.num_fewshot),
                    limit=options.limit,
                    apply_chat_template=self.is_chat,
                    fewshot_as_multiturn=True,
                )
            except torch.OutOfMemoryError as error:
                raise UserError(
                    f"out of memory with {self.batch_size} sequences per batch",
                    code="out-of-memory",
                    where=f"{OPTION} {name}",
                    fix="lower --at-once, then rerun the same command to resume",
                ) from error
        self._check_metrics(name, result)
        samples = {
            task: [{k: v for k, v in row.items() if k not in UNREPEATED} for row in rows]
            for task, rows in result["samples"].items()
        }
        result |= {
            "samples": samples,
            "config": {"model": self.model.target, "batch_size": self.batch_size, **SEEDS},
            "chat_template": run.prepared.tokenizer.chat_template if self.is_chat else None,
            "fewshot_as_multiturn": True,
            "lm_eval_version": self.suite.version,
        }
        return json.loads(json.dumps(result, default=str))

    def _check_metrics(self, name: str, result: Mapping[str, Any]) -> None:
        """Raise UserError for a metric that lm-eval does not know, and leaves out."""
        for task, config in result["configs"].items():
            reported = {key.partition(",")[0] for key in result["results"][task]}
            for entry in config.get("metric_list") or ():
                metric = str(entry["metric"])
                if re.fullmatch(r"[\w+]+", metric) and metric not in reported:
                    raise UserError(
                        f"lm-eval reports no metric {metric!r} of {task}",
                        code="benchmark-failed",
                        where=f"{OPTION} {name}",
                        fix=f"correct metric_list of the task; {self.suite.log} has the reason",
                    )


def _merged(results: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The results of several calls as one: their tables have a key for each task."""
    merged: dict[str, Any] = {}
    for result in results:
        for name, value in result.items():
            if isinstance(value, dict) and name != "config":
                merged[name] = {**merged.get(name, {}), **value}
            else:
                merged[name] = value
    return merged


# The model


class AnswerCounter:
    """Takes the answers of lm-eval's model for its cache, and counts them instead."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.done = progress, 0

    def add_partial(self, kind: str, request: object, answer: Any) -> None:
        """Raises UserError for a log-likelihood that is not finite."""
        value = answer[0] if isinstance(answer, tuple) else answer
        if kind != "generate_until" and not math.isfinite(value):
            raise UserError(
                "a log-likelihood is not finite",
                code="sampling-failed",
                where=self.progress.name,
                fix="add model.dtype=float32; if the error remains, the weights of the model are "
                "not finite: use an earlier checkpoint",
            )
        self.done += 1
        self.progress.update(self.done)


def policy_for_lm_eval(run: Trainer, batch_size: int, phase: str, console: Console) -> Any:
    """The policy of a run as a model of lm-eval.

    Call it and use it inside ``policy.sampling()``. Log-probabilities are computed in float32.
    """
    from lm_eval.models import huggingface

    base: Any = huggingface.HFLM

    @contextmanager
    def progress(model: Any, requests: Sequence[Any]) -> Iterator[None]:
        with Progress(console, phase, len(requests)) as bar:
            model.set_cache_hook(AnswerCounter(bar))
            yield

    class PolicyForLmEval(base):
        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
            with progress(self, requests):
                return super().loglikelihood(requests, disable_tqdm=True)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
            with progress(self, requests):
                return super().loglikelihood_rolling(requests, disable_tqdm=True)

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
            with progress(self, requests):
                return super().generate_until(requests, disable_tqdm=True)

    policy, encoder = run.policy, run.prepared.encoder
    causal, device = policy.causal, policy.device.type
    # the weights are tied already, and adapters may have renamed them
    causal.tie_weights = lambda *_, **__: None
    is_cast = torch.is_autocast_enabled(device)
    return PolicyForLmEval(
        pretrained=causal,
        tokenizer=copy.deepcopy(encoder.tokenizer),  # a padding token may be added
        backend="causal",
        batch_size=batch_size,
        softmax_dtype=torch.float32,
        mixed_precision_dtype=torch.get_autocast_dtype(device) if is_cast else None,
        chat_template_args=dict(encoder.template.kwargs),
    )
