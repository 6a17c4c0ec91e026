"""python -m benchmarks.align [--task films | sums] [--quick] [--seeds N] [--methods NAME ...]
[--folder DIR] [--publish]: what methods of Valence and of TRL gain on the same model and machine.

SmolLM2-135M-Instruct learns to write more positively, as VADER scores it: reward against KL
divergence from the reference on held-out prompts. KTO and DPO train in both libraries on the same
rows in the same order, GRPO on prompts. With ``--task films`` it learns to finish sentences of film
reviews favourably, as a classifier of reviews scores it. With ``--task sums`` it learns to add two
numbers: the share of right answers against the number of sampled completions.

Every run that is complete stays in the folder, so the same command continues where it was stopped.
The complete grid takes a night on two cores, sums four hours, ``--quick`` ten minutes.
``--publish``: only rewrite the page of results from the runs in the folder. Needs TRL's environment
(`make peers`).

Exit status: 0 the losses of both libraries agree; 1 they do not, and nothing is compared; 2 there
is no environment with TRL.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from benchmarks.align import frontier, page
from benchmarks.align.summary import TOLERANCE, summarize
from benchmarks.peers import NO_TRL, peer_python


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.align",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--task", choices=frontier.TASKS, default="positive")
    parser.add_argument("--quick", action="store_true", help="one seed, few steps")
    parser.add_argument("--seeds", type=int, help="number of seeds")
    parser.add_argument("--penalties", type=int, help="number of penalties of each method")
    parser.add_argument("--methods", nargs="+", metavar="NAME")
    parser.add_argument("--folder", type=Path, help="runs/align/TASK")
    parser.add_argument("--publish", action="store_true", help="write the page of results")
    arguments = parser.parse_args()
    disable_progress_bar()
    frontier.use_threads()
    task = frontier.TASKS[arguments.task]
    size = task.quick if arguments.quick else task.full
    size = replace(
        size,
        seeds=arguments.seeds or size.seeds,
        penalties=arguments.penalties or size.penalties,
    )
    if unknown := set(arguments.methods or ()) - task.methods.keys():
        parser.error(f"no method {', '.join(unknown)}; there are {', '.join(task.methods)}")
    methods = {m: p for m, p in task.methods.items() if m in (arguments.methods or task.methods)}
    task = replace(task, methods=methods)
    peer = peer_python()
    if peer is None and set(task.in_trl) & task.methods.keys() and not arguments.publish:
        print(NO_TRL, file=sys.stderr)
        return 2
    folder = arguments.folder or Path("runs/align") / task.name
    runs = frontier.Frontier(folder, task, size, peer, lambda text: print(text, flush=True))
    start = runs.start()
    results = {}
    for case in frontier.cases(task, size):
        if arguments.publish and not runs.has_result(case):
            continue
        results[case.name] = runs.run(case)
    summaries = summarize(results, start)
    print(page.SECTIONS[task.name](results, start))
    if arguments.publish:
        for result in results.values():
            result.pop("rows", None)
        page.publish(page.results_file(task.name), asdict(start), results)
    disagreements = [s.disagreement for s in summaries if s.disagreement is not None]
    return 0 if all(value <= TOLERANCE for value in disagreements) else 1


if __name__ == "__main__":
    sys.exit(main())
