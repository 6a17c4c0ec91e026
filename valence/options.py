"""The options of commands: each is declared once, for the command and for the function below it."""

from __future__ import annotations

import json
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from valence import completion
from valence.types import Chat, Message


def default_of(option: Field[Any]) -> Any:
    """The default of an option; MISSING if it is required."""
    return option.default if option.default_factory is MISSING else option.default_factory()


def changed_options(options: Any, *names: str) -> list[str]:
    """The flags of the options that differ from their defaults. names: of fields; default: all."""
    defaults = {option.name: default_of(option) for option in fields(options)}
    return [
        f"--{name.replace('_', '-')}"
        for name in names or defaults
        if getattr(options, name) != defaults[name]
    ]


def _temperature(default: str = "") -> Any:
    text = "Sampling temperature; 0 takes the most likely token."
    return Option(min=0.0, help=text + default)


def _top_p(default: str = "", min: float | None = None, max: float | None = None) -> Any:
    text = "Sample from the smallest set of tokens with this total probability."
    return Option(min=min, max=max, help=text + default)


def _max_new_tokens(default: str = "") -> Any:
    return Option(min=1, help=f"Maximum tokens per answer.{default}")


AtOnce = Annotated[
    int | None,
    Option(
        min=1,
        help="Answers per batch, the most that a killed command loses. Default: 64.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """What two models answer, who judges the answers, and where the result is written."""

    prompts: Annotated[
        list[str],
        Option(metavar="FILE", help="File of held-out prompts. Can be repeated."),
    ] = field(default_factory=list[str])
    judge: Annotated[
        list[str],
        Option(
            metavar="REWARD",
            help="Reward that judges the answers. It is a rule, a function, a reward model, the "
            "address of a server, or a section as in a recipe. Can be repeated; each judge "
            "has a win rate. A section is a YAML file or '{reward: NAME, settings: {...}}'.",
        ),
    ] = field(default_factory=list[str])
    out: Annotated[
        Path,
        Option(
            metavar="FOLDER",
            help="Folder for all results. Rerun with the same folder to resume.",
        ),
    ] = Path("comparison")
    assertions: Annotated[
        list[str],
        Option(
            metavar="FILE",
            help="File of prompts with a column `assert`, whose answers are not judged. Can be "
            "repeated. Those of --prompts may have assertions too.",
        ),
    ] = field(default_factory=list[str])
    votes: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="The --out file of `valence collect BASELINE CANDIDATE`, as another judge. Needs "
            "no --prompts.",
        ),
    ] = None
    lm_eval: Annotated[
        tuple[Path, Path] | None,
        Option(
            metavar="BASELINE CANDIDATE",
            help="Results of lm_eval (--output_path or a file) for both models. Needs no "
            "--prompts.",
        ),
    ] = None
    lm_eval_tasks: Annotated[
        str | None,
        Option(
            metavar="TASKS",
            help="Tasks, groups, tags or YAML files of lm-eval to evaluate. Such as "
            "arc_easy,hellaswag. Needs no --prompts.",
        ),
    ] = None
    lm_eval_include: Annotated[
        list[Path],
        Option(
            metavar="FOLDER",
            help="Folder with your tasks for lm-eval (YAML files). Can be repeated.",
        ),
    ] = field(default_factory=list[Path])
    lm_eval_fewshot: Annotated[
        int | None,
        Option(min=0, help="Examples before each question. Default: those of the task."),
    ] = None
    lm_eval_limit: Annotated[
        int | None,
        Option(min=1, help="Only the first N questions of each task."),
    ] = None
    lm_eval_chat: Annotated[
        bool | None,
        Option(
            help="Whether lm-eval uses chat templates. Otherwise, it asks in plain text. Default: "
            "as the models are prompted.",
        ),
    ] = None
    other_text: Annotated[
        str,
        Option(
            metavar="FILE",
            help="Texts that measure forgetting: rows, a .txt file, `shipped` (40 texts of "
            "Valence), or `off`. The result says how much worse the candidate predicts them. "
            "Rows can have any format. Blank lines separate the texts of a .txt file. "
            "Default: shipped, if the models answer prompts.",
        ),
    ] = "auto"
    max_forgetting: Annotated[
        float | None,
        Option(
            min=0.0,
            metavar="NATS",
            help="Gate: the candidate's loss on --other-text may exceed the baseline's by NATS "
            "per token. Otherwise, exit with status 3.",
        ),
    ] = None
    labels: Annotated[
        list[str],
        Option(
            metavar="FILE",
            help="File of thumbs or pairs from people, to measure how judges agree with them. Can"
            " be repeated.",
        ),
    ] = field(default_factory=list[str])
    min_agreement: Annotated[
        float | None,
        Option(
            min=0.0,
            max=1.0,
            help="Refuse judges that agree less with --labels. Default: 0.6.",
        ),
    ] = None
    allow_below: Annotated[
        bool, Option("--allow-below", help="Accept judges below --min-agreement.")
    ] = False
    tag: Annotated[
        str | None,
        Option(
            metavar="COLUMN",
            help="Column of the prompts to group win rates by. Default: tags or tag.",
        ),
    ] = None
    max_failed: Annotated[
        float,
        Option(
            min=0.0,
            max=1.0,
            help="Fail if a judge has no verdict on a larger share of prompts.",
        ),
    ] = 0.1
    max_new_tokens: Annotated[int, _max_new_tokens()] = 256
    temperature: Annotated[float, _temperature()] = 0.7
    top_p: Annotated[float, _top_p(min=0.0, max=1.0)] = 1.0
    at_once: AtOnce = None
    seed: Annotated[int, Option(help="Random seed.")] = 0
    fresh: Annotated[
        bool,
        Option("--fresh", help="Rename the existing output, and start over."),
    ] = False


def _path_option(meaning: str) -> Any:
    """An option for the place of one part of a row in an export."""
    return Option(metavar="PATH", help=f"Dotted path of {meaning}.")


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Which votes of an export are imported, and where their rows are written."""

    out: Annotated[
        Path,
        Option(
            help="Write the rows to this .jsonl file, and those of other kinds next to it.",
        ),
    ] = Path("feedback.jsonl")
    since: Annotated[
        str | None,
        Option(
            metavar="DATE|last",
            help="Skip votes before an ISO date, or before the `last` vote in --out.",
        ),
    ] = None
    model: Annotated[str | None, Option(help="Skip votes on completions of other models.")] = None
    url: Annotated[str | None, Option(help="Read from the tool's server instead of files.")] = None
    token_env: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="With --url: environment variable with the API key. Default: the tool's, such as "
            "LANGSMITH_API_KEY.",
        ),
    ] = None
    prompt: Annotated[str | None, _path_option("the prompt")] = None
    completion: Annotated[str | None, _path_option("the rated completion")] = None
    left: Annotated[str | None, _path_option("the first of two compared completions")] = None
    right: Annotated[str | None, _path_option("the second compared completion")] = None
    correction: Annotated[str | None, _path_option("a corrected completion")] = None
    label: Annotated[str | None, _path_option("the vote")] = None
    score_name: Annotated[
        list[str], Option(help="Score to import as feedback. Can be repeated.")
    ] = field(default_factory=list[str])
    category: Annotated[
        list[str],
        Option(
            metavar="NAME=up|down",
            help="Import a category as thumbs, e.g. good=up. Can be repeated.",
        ),
    ] = field(default_factory=list[str])
    unlabelled: Annotated[
        bool,
        Option(
            "--unlabelled",
            help="Also write rows for `hindsight`: answers with a correction or a user message "
            "after them.",
        ),
    ] = False
    include_machine: Annotated[
        bool,
        Option("--include-machine", help="Also import scores of models and programs."),
    ] = False
    keep_reasoning: Annotated[
        bool, Option("--keep-reasoning", help="Keep reasoning blocks in completions.")
    ] = False
    complete: Annotated[
        bool,
        Option(
            "--complete",
            help="The export has all votes: remove stored votes that are not in it.",
        ),
    ] = False
    overwrite: Annotated[
        bool, Option("--overwrite", help="Replace output files that were edited.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """The trials of a sweep, and how they are run."""

    out: Annotated[Path, Option(help="Folder of the sweep. Rerun with the same folder to resume.")]
    over: Annotated[
        list[str],
        Option(
            metavar="KEY=VALUE,VALUE...",
            help="A setting and the values to try, or `recommended`. Several settings can follow. "
            "With --search optuna also a range: train.learning_rate=1e-7:1e-5:log.",
            autocompletion=completion.settings,
        ),
    ] = field(default_factory=list[str])
    seeds: Annotated[
        int,
        Option(min=1, help="Seeds per configuration."),
    ] = 1
    objective: Annotated[
        str | None,
        Option(
            metavar="NAME[:max|:min]",
            help="Held-out metric to compare. Default: that of the report.",
        ),
    ] = None
    search: Annotated[
        str | None, Option(help="`optuna`: choose configurations by the results so far.")
    ] = None
    trials: Annotated[
        int | None, Option(min=1, help="With --search: number of configurations. Default: 20.")
    ] = None
    baseline: Annotated[bool, Option(help="Also try the values of the recipe.")] = True
    stop_early: Annotated[
        bool,
        Option(
            "--stop-early",
            help="Stop trials below the median of the finished ones at the same step. Rerun "
            "without it to continue them.",
        ),
    ] = False
    nproc: Annotated[int | None, Option(min=1, help="Processes per trial.")] = None

    @property
    def num_trials(self) -> int | None:
        """Trials of a search; None for a complete grid."""
        return (self.trials or 20) if self.search else None


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """The prompts, the number of completions of each, the sampling parameters, and where the
    completions are written.

    Sampling parameters that are None are those of the recipe's ``rollout`` section.
    """

    n: Annotated[
        int | None,
        Option(
            "-n",
            min=1,
            max=65536,
            metavar="N",
            help="Answers per prompt. Default: rollout.num_rollouts with a reward, else 1.",
        ),
    ] = None
    temperature: Annotated[
        float | None,
        _temperature(" Default: rollout.temperature of the recipe, else 0.7, or 1 with --out."),
    ] = None
    top_p: Annotated[float | None, _top_p(" Default: rollout.top_p, else 1.")] = None
    max_new_tokens: Annotated[
        int | None,
        _max_new_tokens(" Default: rollout.max_new_tokens, else 256, or 512 with --out."),
    ] = None
    at_once: AtOnce = None
    seed: Annotated[int, Option(help="Random seed.")] = 0
    prompt: Annotated[
        list[str],
        Option(
            help="Text of a prompt, a user message if the model has a chat template "
            "(data.as_chat). Can be repeated.",
        ),
    ] = field(default_factory=list[str])
    data: Annotated[
        list[str],
        Option(
            help="File of rows with a column `prompt` or `text`. Other columns go to `info`. Can "
            "be repeated. Default with --out: the training prompts of a recipe with a "
            "reward.",
        ),
    ] = field(default_factory=list[str])
    system: Annotated[str | None, Option(help="System message before each --prompt.")] = None
    out: Annotated[
        Path | None,
        Option(help="Write the answers with their tokens to this .jsonl file, or resume it."),
    ] = None
    append: Annotated[
        bool,
        Option("--append", help="Append answers to other prompts, or with another seed, to --out."),
    ] = False
    fresh: Annotated[
        bool, Option("--fresh", help="Rename the existing output, and start over.")
    ] = False

    @property
    def questions(self) -> list[str | Chat]:
        """The prompts that are options, as chats with a system message if there is one."""
        if self.system is None:
            return [*self.prompt]
        first: Message = {"role": "system", "content": self.system}
        return [Chat((first, {"role": "user", "content": prompt})) for prompt in self.prompt]


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """The rows to score, and how they are scored: by a reward, or by a model."""

    reward: Annotated[
        list[str],
        Option(
            help="Reward to score with. It is a function, a rule, a reward model, the address of "
            "a server, or a section as in a recipe. Can be repeated; rewards are added. "
            "Default: that of the recipe.",
        ),
    ] = field(default_factory=list[str])
    data: Annotated[
        list[str],
        Option(
            help="File of rows with answers. It can also be a section as in a recipe. The "
            "recipe's column names apply where they fit. Can be repeated.",
        ),
    ] = field(default_factory=list[str])
    out: Annotated[
        Path | None,
        Option(help="Write the rows with their scores to this .jsonl file, or resume it."),
    ] = None
    reference: Annotated[
        str | None, Option(help="Reference model for implicit rewards: folder or hub id.")
    ] = None
    beta: Annotated[
        float | None,
        Option(
            help="Beta of the implicit rewards; not for runs. Default: that of the recipe, else "
            "0.1.",
        ),
    ] = None
    dtype: Annotated[
        str | None,
        Option(
            help="float32, bfloat16 or float64. Default: that of the recipe; float32 for a model."
        ),
    ] = None
    max_length: Annotated[
        int | None,
        Option(help="Maximum tokens of a row; longer rows get an error. Default: 1024."),
    ] = None
    tokens: Annotated[int | None, Option(min=1, help="Tokens per forward pass. Default: 8192.")] = (
        None
    )
    format: Annotated[str | None, Option(help="Format of the rows. Default: detected.")] = None
    column: Annotated[str, Option(help="Name of the column to add.")] = "valence"
    fresh: Annotated[
        bool, Option("--fresh", help="Rename the existing output, and start over.")
    ] = False
    verify: Annotated[
        int,
        Option(
            min=0,
            metavar="N",
            help="Compute N sequences of a reference cache again, and compare.",
        ),
    ] = 0

    @property
    def settings(self) -> list[str]:
        """The settings of a recipe that options change, as overrides."""
        values = {
            "model.dtype": self.dtype,
            "data.max_length": self.max_length,
            "reference.model": self.reference,
        }
        return [
            f"{name}={json.dumps(value)}" for name, value in values.items() if value is not None
        ]


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """How labels are audited, and where the rows are written."""

    model: Annotated[
        str | None,
        Option(
            metavar="MODEL|RUN",
            help="List labels that contradict a classifier on the hidden states of this model. It "
            "is a run, a recipe, a model folder or a hub id.",
            autocompletion=completion.run_folders,
        ),
    ] = None
    review: Annotated[
        bool,
        Option(
            "--review",
            help="Review the suspicious rows in a web page, and write all rows to --out.",
        ),
    ] = False
    out: Annotated[
        Path | None,
        Option(
            help="Write the rows to this .jsonl file: with --model the most suspicious first, "
            "with --review the reviewed ones. With --model, the findings are in "
            "`info.audit`.",
        ),
    ] = None
    top: Annotated[int, Option(min=1, help="Suspicious rows to list.")] = 20
    format: Annotated[
        str | None, Option(help="Format of the files, or the tool that exported them.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class SelectOptions:
    """How prompts are selected, and where they are written."""

    rated: Annotated[list[str], Option(help="File of rated rows. Can be repeated.")]
    model: Annotated[
        str,
        Option(
            metavar="MODEL|RUN",
            help="Model whose hidden states compare prompts and answers. It is a run, a recipe, a "
            "model folder or a hub id.",
            autocompletion=completion.run_folders,
        ),
    ]
    out: Annotated[Path, Option(help="Write the prompts to this .jsonl file, in order.")]
    num: Annotated[int, Option(min=1, help="Prompts to select.")] = 100


Host = Annotated[
    str,
    Option(help="Address to listen on; 0.0.0.0 lets other machines connect, with a token."),
]
AllowedHost = Annotated[
    list[str] | None,
    Option(
        metavar="NAME",
        help="Another host name for this server, or * for any. IP addresses, localhost, --host "
        "and the name of this machine are always allowed. Can be repeated.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class PageOptions:
    """Where a web page is served, and who can open it."""

    rater: Annotated[
        list[str], Option(help="Print a secret link for this rater. Can be repeated.")
    ] = field(default_factory=list[str])
    host: Host = "127.0.0.1"
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = (
        8765
    )
    allowed_host: AllowedHost = None
    no_token: Annotated[
        bool,
        Option(
            "--no-token", help="Let all users of this machine open the page without a secret link."
        ),
    ] = False
