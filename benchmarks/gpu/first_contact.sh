#!/bin/bash
# first_contact.sh PART [--rehearse] [--retry]: checks and measurements on a GPU machine.
#
# PART: A (is it right?), B (is it fast?) or C (compared with TRL); see __main__.py. Start a part again and
# it goes on after the last result. --rehearse runs all of it on a CPU, with tiny sizes.
#
# OUT: folder for results.jsonl and profiles (default: that of WORK). WORK: folder for models,
# packages and a copy of the results (default build/first_contact). BUDGET: seconds for the part
# (default 220). PYTHON: the interpreter (default python3). WHEELS: folder that
# `python -m benchmarks.gpu.wheels` has filled (default build/wheels).
set -u
cd "$(dirname "$0")/../.." || exit 1
WORK=${WORK:-$PWD/build/first_contact}
OUT=${OUT:-$WORK}
BUDGET=${BUDGET:-220}
PYTHON=${PYTHON:-python3}
WHEELS=${WHEELS:-build/wheels}
UNTIL=$(($(date +%s) + BUDGET))
mkdir -p "$WORK" "$OUT"
export PYTHONPATH=$PWD:$WORK/packages TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export TQDM_DISABLE=1 TRL_EXPERIMENTAL_SILENCE=1

if compgen -G "$WHEELS/*.whl" >/dev/null && [ ! -e "$WORK/packages/.complete" ]; then
    install=("$PYTHON" -m pip install -q --no-index --no-deps --no-compile --upgrade
        --target "$WORK/packages")
    # A wheel for another version of Python must not keep the others out.
    "${install[@]}" "$WHEELS"/*.whl || for wheel in "$WHEELS"/*.whl; do "${install[@]}" "$wheel"; done
    touch "$WORK/packages/.complete"
fi
# A program that hangs in a library cannot end itself.
exec timeout -k 5 $((BUDGET + 10)) "$PYTHON" -m benchmarks.gpu "$@" --out "$OUT" --work "$WORK" \
    --until "$UNTIL"
