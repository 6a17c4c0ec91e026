"""Run GGUF files through llama.cpp, and quantize them with it.

llama.cpp is used as installed by the npm package ``node-llama-cpp``, which contains a compiled
library for each platform, or through its program ``llama-quantize``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import numpy as np

from valence.apps.export.probes import MAX_NEW_TOKENS, ArtifactResult, Probe, ProbeResult
from valence.errors import UserError
from valence.storage import read_json

SETTING = "VALENCE_LLAMA_CPP"
"""Environment variable with the folder in which node-llama-cpp was installed."""
NPM = "npm install --ignore-scripts node-llama-cpp"
INSTALL = f"run `{NPM}` in any folder, and set {SETTING} to that folder"
DRIVER = Path(__file__).with_name("llama_cpp.mjs")
QUANTIZER = Path(__file__).with_name("quantize_process.py")
PACKAGE = Path("node_modules/node-llama-cpp/dist/index.js")


@dataclass(frozen=True)
class LlamaCpp:
    """An installed llama.cpp. node: the program that runs ``module``, the library's module."""

    node: str
    module: Path

    @property
    def library(self) -> Path | None:
        """The compiled library of llama.cpp; None if it is not where this package expects it."""
        root = self.module.parents[2] / "@node-llama-cpp"
        for pattern in ("libllama.*", "libllama.so*", "libllama*.dylib"):
            for path in sorted(root.glob(f"*/bins/*/{pattern}")):
                return path
        return None


def find_llama_cpp() -> LlamaCpp | None:
    """Find node-llama-cpp; None if it is not installed.

    Raises UserError if the environment variable names a folder without it.
    """
    node = shutil.which("node")
    setting = os.environ.get(SETTING)
    if setting:
        module = Path(setting).expanduser().absolute() / PACKAGE
        if not module.is_file() or node is None:
            missing = "node is not on PATH" if node is None else "there is no node-llama-cpp in it"
            raise UserError(
                f"{setting}: {missing}",
                code="llama-cpp-missing",
                where=SETTING,
                fix=f"install Node.js 20 or later, and run `{NPM}` in that folder",
            )
        return LlamaCpp(node, module)
    if node is None:
        return None
    folders = (Path.cwd(), Path(node).resolve().parents[1] / "lib")
    return next(
        (LlamaCpp(node, folder / PACKAGE) for folder in folders if (folder / PACKAGE).is_file()),
        None,
    )


def run_llama_cpp(
    llama: LlamaCpp,
    path: Path,
    probes: Sequence[Probe],
    expected: Sequence[ProbeResult],
    *,
    variables: Mapping[str, Any],
    end_ids: Collection[int],
    on_probe: Callable[[int], None] = lambda done: None,
) -> ArtifactResult:
    """Run prompts through a GGUF file in a separate process.

    variables: of the chat template. expected: the run's answers, at whose tokens logits are
    computed. on_probe: called with the number of prompts done. Raises UserError if llama.cpp does
    not start or is stopped by a lack of memory or disk space (``llama-cpp-broken``), or cannot load
    or run the file (``llama-cpp-failed``).
    """
    longest = max(len(p.ids) + len(a.completion) for p, a in zip(probes, expected, strict=True))
    vocabulary = expected[0].logits.shape[1]
    with TemporaryDirectory() as name:
        out = Path(name)
        request = {
            "module": str(llama.module),
            "model": str(path.absolute()),
            "out": str(out),
            "context": 2 * longest + MAX_NEW_TOKENS + 64,
            "threads": max(1, (os.cpu_count() or 1) // 2),
            "vocabulary": vocabulary,
            "max_new_tokens": MAX_NEW_TOKENS,
            "ends": list(end_ids),
            "variables": dict(variables),
            "prompts": [
                {
                    "messages": None if p.messages is None else [dict(m) for m in p.messages],
                    "text": p.text,
                    "prompt_ids": list(p.ids),
                    "completion_ids": list(a.completion),
                }
                for p, a in zip(probes, expected, strict=True)
            ],
        }
        (out / "request.json").write_text(json.dumps(request), encoding="utf-8")
        errors = out / "errors.txt"
        with errors.open("w", encoding="utf-8") as stderr:
            is_loaded, status = _run_driver(llama, out / "request.json", stderr, on_probe)
        if not (out / "result.json").is_file():
            lines = errors.read_text(encoding="utf-8", errors="replace").splitlines()
            if not is_loaded:
                raise UserError(
                    f"node-llama-cpp does not start ({_reason(lines)})",
                    code="llama-cpp-broken",
                    where=str(llama.module.parents[3]),
                    fix="install Node.js 20 or later, then reinstall node-llama-cpp",
                )
            if status == -signal.SIGKILL or any("ENOSPC" in line for line in lines):
                reason = _reason(lines) if lines else "it was killed"
                raise UserError(
                    f"node-llama-cpp could not finish ({reason})",
                    code="llama-cpp-broken",
                    where=path.name,
                    fix=f"free memory, and disk space in {out.parent}; then use --verify-only",
                )
            raise UserError(
                f"llama.cpp cannot run this file ({_reason(lines)})",
                code="llama-cpp-failed",
                where=path.name,
                fix="use another GGUF type, or the model folder with transformers or vLLM",
            )
        data = read_json(out / "result.json")
        results = tuple(
            ProbeResult(
                error=probe["error"],
                text=probe["text"],
                ids=tuple(probe["ids"] or ()),
                completion=tuple(probe["completion"]),
                stop=probe["stop"],
                logits=np.fromfile(out / f"{i}.f32", np.float32).reshape(-1, vocabulary),
            )
            for i, probe in enumerate(data["prompts"])
        )
    release = f", {data['release']}" if data["release"] else ""
    return ArtifactResult(
        runtime=f"llama.cpp (node-llama-cpp {data['version']}{release})",
        stops=tuple(data["eog"]),
        results=results,
        other_stops=tuple(data["other_eog"]),
    )


def _run_driver(
    llama: LlamaCpp, request: Path, stderr: IO[str], on_probe: Callable[[int], None]
) -> tuple[bool, int]:
    """Run the driver, which writes its results next to the request.

    Returns whether it could load llama.cpp, and its exit status, negative for a signal. on_probe:
    called with the number of prompts done.
    """
    is_loaded = False
    with subprocess.Popen(
        [llama.node, str(DRIVER), str(request)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        encoding="utf-8",
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                # node-llama-cpp may print lines too
                is_loaded = is_loaded or line.strip() == "0"
                if line.strip().isdecimal():
                    on_probe(int(line))
            status = process.wait()
        finally:
            process.kill()  # has no effect on a process that has ended
    return is_loaded, status


def _reason(lines: Sequence[str]) -> str:
    """The line of an error output that names the error."""
    named = [line.strip() for line in lines if "rror" in line]
    return (named or [line.strip() for line in lines] or ["no output"])[0]


def check_quantizer(file_type: str, llama: LlamaCpp | None) -> None:
    """Raise UserError if nothing on this machine can quantize to a type of llama.cpp."""
    if shutil.which("llama-quantize") or (llama and llama.library):
        return
    raise UserError(
        f"{file_type} needs llama.cpp's quantizer: llama-quantize is not on PATH, and "
        "node-llama-cpp is not installed",
        code="llama-cpp-missing",
        where="--gguf",
        fix=f"{INSTALL}; or use q8_0 or q4_0, which need no tool",
    )


def quantize(source: Path, target: Path, file_type: str, llama: LlamaCpp | None) -> str:
    """Quantize a GGUF file with llama.cpp; returns the name of the tool.

    Raises UserError if there is no tool, or if it fails.
    """
    check_quantizer(file_type, llama)
    program = shutil.which("llama-quantize")
    if program:
        words = [program, str(source), str(target), file_type.upper()]
    else:
        import gguf

        assert llama is not None
        number = gguf.LlamaFileType[f"MOSTLY_{file_type.upper()}"].value
        words = [sys.executable, str(QUANTIZER), str(llama.library), str(source), str(target)]
        words.append(str(number))
    done = subprocess.run(
        words, capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    if done.returncode or not target.is_file():
        raise UserError(
            f"llama.cpp cannot quantize to {file_type} "
            f"({_reason((done.stderr + done.stdout).strip().splitlines())})",
            code="llama-cpp-failed",
            where="--gguf",
            fix="use another GGUF type",
        )
    return "llama-quantize" if program else "the library of node-llama-cpp"
