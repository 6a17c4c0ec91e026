"""Reward against KL divergence from the reference, of methods of Valence and of TRL.

Offline methods train on one set of answers that the reference has sampled: thumbs (above or below
the median of the prompt), pairs (best and worst), or demonstrations (the top half). Online methods
sample for themselves. There are three tasks: to write positively, as VADER scores it, to write as a
favourable film review, and sums.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import valence
from benchmarks.align.measures import SCORES, HeldOut, Point
from benchmarks.online.__main__ import HELD_OUT, QUESTIONS, TOPICS
from benchmarks.parity.cases import z0_of_trl
from benchmarks.parity.sides import trl_row
from benchmarks.peers import ROOT, peer_environment
from benchmarks.tools.__main__ import write
from examples.demo import assets
from valence.jobs.sample_rows import sample_rows
from valence.options import SampleOptions

Library = Literal["valence", "trl"]
Row = dict[str, Any]

NUM_ANSWERS, BATCH = 8, 4
"""Completions of each prompt; prompts per step online."""
ROWS = {"kto": ("thumbs", 16), "dpo": ("pairs", 8), "sft": ("top_half", 16)}
"""Kind and number of rows per step of offline methods."""
RATES = {"kto": 2e-5, "dpo": 1e-5, "sft": 2e-5}
ANSWERS = ("completion", "chosen", "rejected")
"""Columns with token ids of answers."""
ONLINE_RATE, VALUE_RATE = 1e-5, 1e-4
PPO_EPOCHS = 2


@dataclass(frozen=True)
class Size:
    """How much is run. steps: optimizer steps of offline methods, and rounds of online methods.
    measured: number of measurements in a run. samples: completions of each held-out prompt.
    seeds, penalties: number of runs of a method.
    """

    steps: int
    rounds: int
    measured: int
    samples: int
    seeds: int
    penalties: int


Penalties = tuple[float | None, ...]


Questions = tuple[list[str], list[str]]
"""To train on, and held out."""


@dataclass(frozen=True)
class Task:
    """What is learned. reward: in a recipe. methods: the values of beta, or of the weight of the KL
    penalty; the first one is that of a quick run. in_trl: methods that TRL runs too.
    """

    name: str
    questions: Callable[[], Questions]
    reward: str
    max_new_tokens: int
    methods: dict[str, Penalties]
    in_trl: tuple[str, ...]
    full: Size
    quick: Size


def about_topics() -> Questions:
    train, held_out = (
        [question.format(topic) for topic in topics for question in QUESTIONS]
        for topics in (TOPICS[HELD_OUT:], TOPICS[:HELD_OUT])
    )
    return train, held_out


def film_beginnings() -> Questions:
    texts = [text for text, _ in assets.film_reviews(96)]
    prompts = [f"Finish this sentence of a film review: {' '.join(t.split()[:8])}" for t in texts]
    return prompts[24:], prompts[:24]


def sums() -> Questions:
    pairs = [(a, b) for a in range(1, 21) for b in range(1, 21)]
    chosen = random.Random("sums").sample(pairs, 400)
    prompts = [f"What is {a} + {b}? Answer with the number only." for a, b in chosen]
    return prompts[96:], prompts[:96]


TASKS = {
    task.name: task
    for task in (
        Task(
            "positive", about_topics, "vader", 40,
            {
                "kto": (0.1, 0.03, 0.3), "dpo": (0.1, 0.03, 0.3),
                "dpo+humanline": (0.1, 0.03, 0.3), "sft": (None,),
                "grpo": (0.01, 0.0, 0.1), "online_dpo": (0.1, 0.03, 0.3),
            },
            ("kto", "dpo", "grpo"), Size(24, 16, 4, 2, 3, 3), Size(3, 2, 1, 1, 1, 1),
        ),
        Task(
            "films", film_beginnings, "benchmarks.align.measures:favourable", 40,
            {"dpo": (0.1, 0.03, 0.3), "sft": (None,), "ppo": (0.02, 0.0, 0.1)},
            (), Size(24, 16, 4, 2, 3, 3), Size(3, 2, 1, 1, 1, 1),
        ),
        Task(
            "sums", sums, "benchmarks.align.measures:right_sum", 16,
            {"grpo": (0.0,), "dapo": (0.0,), "dapo+replace_tied": (0.0,), "rloo": (0.0,)},
            ("grpo", "dapo", "rloo"), Size(0, 32, 4, 2, 3, 1), Size(0, 2, 1, 1, 1, 1),
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A run of a method, such as ``dpo``, or ``dpo+humanline`` with that option. penalty: beta, or
    the weight of the KL penalty.
    """

    library: Library
    method: str
    penalty: float | None
    seed: int

    @property
    def trained(self) -> str:
        """The method without an option."""
        return self.method.partition("+")[0]

    @property
    def is_offline(self) -> bool:
        return self.trained in ROWS

    @property
    def name(self) -> str:
        return f"{self.library}-{self.method}-{self.penalty}-{self.seed}"


def cases(task: Task, size: Size) -> list[Case]:
    """All runs, seed by seed. A run of TRL follows that of Valence, whose order of rows it has."""
    return [
        Case(library, method, penalty, seed)
        for seed in range(size.seeds)
        for method, penalties in task.methods.items()
        for penalty in penalties[: size.penalties]
        for library in (("valence", "trl") if method in task.in_trl else ("valence",))
    ]


def read(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def chat(text: str) -> list[Row]:
    return [{"role": "user", "content": text}]


def sample_answers(
    prompts: Path, model: Path, out: Path, num_answers: int, max_new_tokens: int, dtype: str
) -> list[Row]:
    """Answers of the model to each prompt, sampled unless the file has all of them."""
    if not out.exists() or len(read(out)) < num_answers * len(read(prompts)):
        options = SampleOptions(
            n=num_answers, temperature=1.0, max_new_tokens=max_new_tokens,
            data=[str(prompts)], out=out,
        )  # fmt: skip
        sample_rows(str(model), options, overrides=[f"model.dtype={dtype}"])
    return read(out)


def store(file: Path, result: Row) -> None:
    aside = file.with_suffix(".partial")
    aside.write_text(json.dumps(result))
    aside.replace(file)


def make_rows(folder: Path, model: Path, task: Task) -> None:
    """Write the answers of the reference as rows of each kind."""
    score = SCORES[task.name][0]
    answers = sample_answers(
        folder / "train.jsonl", model, folder / "answers.jsonl",
        NUM_ANSWERS, task.max_new_tokens, "float32",
    )  # fmt: skip
    by_prompt: dict[str, list[Row]] = {}
    for row in answers:
        if row["stop"] == "eos":  # an answer that was cut off would teach when to stop
            by_prompt.setdefault(json.dumps(row["prompt"]), []).append(row)
    rows: dict[str, list[Row]] = {name: [] for name, _ in ROWS.values()}
    for prompt, sampled in by_prompt.items():
        turns = [[{"role": "assistant", "content": row["completion"]}] for row in sampled]
        rewards = score(prompts=[row["prompt"] for row in sampled], completions=turns)
        ordered = sorted(zip(rewards, sampled, strict=True), key=lambda scored: -scored[0])
        texts, half = [row["completion"] for _, row in ordered], len(ordered) // 2
        for place, text in enumerate(texts):
            answer = {"prompt": json.loads(prompt), "completion": text}
            rows["thumbs"].append(answer | {"label": place < half})
            rows["top_half"] += [answer] if place < half else []
        pair = {"prompt": json.loads(prompt), "chosen": texts[0], "rejected": texts[-1]}
        rows["pairs"] += [pair] if texts[0] != texts[-1] else []
    for name, kind in rows.items():
        write(folder / f"{name}.jsonl", kind)


class Frontier:
    """Makes the runs that have no result yet. Everything stays in the folder."""

    def __init__(
        self,
        folder: Path,
        task: Task,
        size: Size,
        peer: Path | None,
        say: Callable[[str], None],
    ) -> None:
        self.folder, self.task, self.size, self.peer, self.say = folder, task, size, peer, say
        folder.mkdir(parents=True, exist_ok=True)
        self.model = assets.smollm2()
        train, held_out = ([chat(text) for text in texts] for texts in task.questions())
        write(folder / "train.jsonl", [{"prompt": prompt} for prompt in train])
        if task.methods.keys() & ROWS.keys():
            make_rows(folder, self.model, task)
        self.tokenizer = AutoTokenizer.from_pretrained(self.model)
        self.reference = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        self.held_out = HeldOut.of(self.tokenizer, held_out, task.max_new_tokens, size.samples)

    def result_file(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def start(self) -> Point:
        """The reference."""
        file = self.result_file(f"reference-{self.size.samples}")
        if not file.exists():
            store(file, asdict(self.measure(self.reference)))
        return Point(**json.loads(file.read_text()))

    def measure(self, policy: Any, **progress: Any) -> Point:
        return self.held_out.measure(
            policy, self.reference, self.tokenizer, SCORES[self.task.name], **progress
        )

    def steps_of(self, case: Case) -> int:
        if case.is_offline:
            return self.size.steps
        return self.size.rounds * (PPO_EPOCHS if case.method == "ppo" else 1)

    def measured(self, case: Case) -> list[int]:
        steps, number = self.steps_of(case), self.size.measured
        return [steps * (i + 1) // number for i in range(number)]

    def result_of(self, case: Case) -> Path:
        size = self.size
        return self.result_file(f"{case.name}-{self.steps_of(case)}-{size.measured}-{size.samples}")

    def has_result(self, case: Case) -> bool:
        return self.result_of(case).exists()

    def run(self, case: Case) -> Row:
        """The result of a run, which is made if there is none."""
        file = self.result_of(case)
        if not self.has_result(case):
            start = time.perf_counter()
            ours = case.library == "valence"
            make: Callable[[Case], Row] = self._train if ours else self._train_in_trl
            result: Row = {**asdict(case), "samples": not case.is_offline, **make(case)}
            store(file, result)
            last = Point(**result["points"][-1])
            self.say(
                f"{case.name}: reward {last.reward:+.3f}, KL {last.kl:.2f}, "
                f"{result['seconds']:.0f} s of training, {time.perf_counter() - start:.0f} s in all"
            )
        return json.loads(file.read_text())

    def recipe(self, case: Case) -> Row:
        method = case.trained
        losses: dict[str, Row] = {
            "kto": {"beta": case.penalty, **z0_of_trl(ROWS["kto"][1])},
            "dpo": {"beta": case.penalty},
            "sft": {},
            "online_dpo": {"beta": case.penalty},
            "ppo": {"kl_beta": case.penalty},
            "rloo": {"kl_beta": case.penalty},
        }
        if case.penalty and method == "grpo":  # k2 has the gradient of TRL's default penalty
            losses["grpo"] = {"kl_weight": case.penalty, "kl_estimator": "k2"}
        rows, batch_size = ROWS.get(method, ("train", BATCH))
        recipe: Row = {
            "method": method,
            "model": {"name": str(self.model), "dtype": "float32"},
            "data": {"train": str(self.folder / f"{rows}.jsonl"), "max_length": 128},
            "loss": losses.get(method, {"kl_weight": case.penalty}),
            "train": {
                "batch_size": batch_size, "max_steps": self.steps_of(case), "seed": case.seed,
                "learning_rate": RATES.get(method, ONLINE_RATE), "schedule": "constant",
                "warmup": 0, "clip_norm": 1.0, "compile": "off",
            },
            "run": {"dir": str(self.folder / "run"), "save_every": 1_000_000},
        }  # fmt: skip
        if case.method == "dpo+humanline":  # with the settings of its authors
            recipe["loss"] |= {"humanline": [-1.0, 1.5]}
            recipe["reference"] = {"sync_every": 1}
        if case.is_offline:
            recipe["train"]["drop_last"] = True
        else:
            recipe["reward"] = self.task.reward
            recipe["rollout"] = {
                "num_rollouts": NUM_ANSWERS, "max_new_tokens": self.task.max_new_tokens
            }  # fmt: skip
        if method == "dapo":
            recipe["rollout"]["replace_tied"] = case.method == "dapo+replace_tied"
        if method == "ppo":
            recipe["rollout"]["epochs"] = PPO_EPOCHS
            recipe["value"] = {"learning_rate": VALUE_RATE}
        return recipe

    def _train(self, case: Case) -> Row:
        start = time.perf_counter()
        measuring = Measuring(self, case, start)
        run = valence.build_run(self.recipe(case), callbacks=[measuring], fresh=True, quiet=True)
        run.fit()
        return {
            "points": [asdict(point) for point in measuring.points],
            "losses": measuring.losses,
            "seconds": measuring.seconds,
            "tokens": round(measuring.tokens),
            "rows": measuring.rows,
        }

    def _train_in_trl(self, case: Case) -> Row:
        assert self.peer is not None
        ours = self.run(Case("valence", case.method, case.penalty, case.seed))
        sampling = {
            "beta": case.penalty, "num_generations": NUM_ANSWERS, "temperature": 1.0, "top_p": 1.0,
            "max_completion_length": self.task.max_new_tokens, "top_k": 0,
        }  # fmt: skip
        configs: dict[str, Row] = {
            "grpo": {**sampling, "loss_type": "grpo", "scale_rewards": "group"},
            "dapo": {**sampling, "loss_type": "dapo", "epsilon_high": 0.28},
            "rloo": sampling,
        }
        batch = ROWS[case.method][1] if case.is_offline else BATCH * NUM_ANSWERS
        job = {
            "task": self.task.name, "trainer": case.method, "model": str(self.model),
            "held_out": asdict(self.held_out),
            "steps": self.steps_of(case), "rows": ours["rows"], "measured": self.measured(case),
            "learning_rate": RATES.get(case.method, ONLINE_RATE), "seed": case.seed,
            "config": configs.get(case.method, {"beta": case.penalty}), "batch": batch,
        }  # fmt: skip
        result = run_trl(self.peer, job, self.folder)
        return {**result, "tokens": ours["tokens"]} if case.is_offline else result


def run_trl(peer: Path, job: Row, folder: Path) -> Row:
    """The result of a job of TRL. The files of both stay in the folder."""
    files = folder / "job.json", folder / "trl.json"
    files[0].write_text(json.dumps(job))
    files[1].unlink(missing_ok=True)
    command = [str(peer), "-m", "benchmarks.align.trl_side", *map(str, files)]
    environment = peer_environment() | {
        "OMP_NUM_THREADS": str(torch.get_num_threads()), "HF_HUB_OFFLINE": "1"
    }  # fmt: skip
    process = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{process.stderr[-4000:]}")
    return json.loads(files[1].read_text())


def training_rows(run: Any) -> list[Row]:
    """The rows of a run in the format of TRL, in the order of the steps."""
    sampler, rows = run.prepared.sampler, list[Row]()
    for step in range(run.total_steps):
        indices, _ = sampler.step(step)
        if run.prepared.method.online:
            prompts = run.prepared.corpora["train"].loaded.examples
            rows += [{"prompt": [dict(m) for m in prompts[i].prompt.messages]} for i in indices]
        else:
            rows += [trl_row(sampler.units[i]) for i in indices]
    return rows


def answer_tokens(rows: list[Row]) -> int:
    """Tokens of the answers in these rows. Rows of online methods have none yet."""
    return sum(len(row.get(name, ())) for row in rows for name in ANSWERS)


class Measuring(valence.Callback):
    """Measures the policy at some steps, and the seconds of training from loading the policy on,
    without the measurements. tokens: of all answers that are trained on.
    """

    def __init__(self, frontier: Frontier, case: Case, start: float) -> None:
        self.frontier, self.case = frontier, case
        self.points: list[Point] = []
        self.losses: list[float] = []
        self.rows: list[Row] = []
        self.seconds, self.since = 0.0, start
        self.tokens = 0.0

    def on_start(self, run: Any) -> None:
        self.rows = training_rows(run)
        self.tokens += answer_tokens(self.rows)

    def on_step(self, run: Any) -> None:
        self.seconds += time.perf_counter() - self.since
        if run.step in self.frontier.measured(self.case):
            sampled = NUM_ANSWERS * run.examples.metrics.get("prompts", 0)
            self.points.append(
                self.frontier.measure(
                    run.policy.causal, step=run.step, seconds=self.seconds, sampled=sampled
                )
            )
        self.since = time.perf_counter()

    def on_log(self, run: Any, record: Any) -> None:
        if "loss" in record:
            self.losses.append(record["loss"])
        if "rollout/length" in record:
            self.tokens += record["rollout/length"] * NUM_ANSWERS * BATCH


def use_threads() -> None:
    """Use as many threads as OMP_NUM_THREADS says, on both sides."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
