"""python -m benchmarks.step [--quick]: compare the speed and memory of a training step with TRL's,
and measure how long training waits for micro-batches.

Exit status: 0 all figures reach their bars, 1 some do not, 2 there is no environment with TRL: then
only the waiting is measured.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.peers import NO_TRL, peer_python
from benchmarks.step.cases import CASES
from benchmarks.step.peer import Peer


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="three cases (or those of --only), against TRL's fastest configuration only",
    )
    parser.add_argument(
        "--only",
        metavar="NAME",
        action="append",
        help=f"a case, or several: {', '.join(c.name for c in CASES)}",
    )
    parser.add_argument(
        "--alone",
        action="store_true",
        help="without TRL: measure only how long training waits for micro-batches",
    )
    parser.add_argument(
        "--float32",
        action="store_true",
        help="compute in float32 on both sides: for CPUs without instructions for bfloat16",
    )
    arguments = parser.parse_args()
    cases = tuple(
        case
        for case in CASES
        if (case.name in arguments.only if arguments.only else case.quick or not arguments.quick)
    )
    os.environ["CUDA_VISIBLE_DEVICES"] = (
        ""  # both sides run on the CPU; for a GPU there is ``benchmarks.gpu``
    )
    python = peer_python()
    if python is None and not arguments.alone:
        print(NO_TRL, file=sys.stderr)
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        peer = None
        if python is not None and not arguments.alone:
            peer = stack.enter_context(Peer(python, Path(scratch) / "trl.log"))
        # torch and transformers, while TRL's process imports its own
        from benchmarks.step.compare import (
            compare,
        )

        status = compare(
            cases, peer, Path(scratch), quick=arguments.quick, float32=arguments.float32
        )
        return status if status or peer or arguments.alone else 2


if __name__ == "__main__":
    sys.exit(main())
