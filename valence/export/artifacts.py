"""Write the GGUF files of an exported folder, and verify everything in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from safetensors import SafetensorError

from valence.data.encode import Encoder
from valence.errors import UserError
from valence.export.gguf_file import (
    DIRECT_TYPES,
    check_type,
    file_type_of,
    lossless_type,
    max_tensor_error,
    read_metadata,
    write_gguf,
)
from valence.export.gguf_tokenizer import has_nfc_normalizer
from valence.export.llama_cpp import INSTALL, LlamaCpp, check_quantizer, quantize, run_llama_cpp
from valence.export.ollama import modelfile
from valence.export.probes import ArtifactResult, Probe, ProbeResult, run_transformers
from valence.export.verify import ExportDifference, Verification, compare
from valence.export.vllm import MAX_LOGPROBS, run_vllm
from valence.runs.store import write_atomically

REPORT = "verification.json"
SECTION = "## Verification"
Progress = Callable[[str], None]
"""Receives a short description of what is being done."""


@dataclass(frozen=True)
class ReferenceRun:
    """The run that exported files are compared with: its prompts and its answers.

    base: the base model, which the run holds in ``dtype``. rounded_base: the
    run computed with a 4-bit base model, and the export has that model's unquantized weights.
    """

    encoder: Encoder
    probes: Sequence[Probe]
    answers: Sequence[ProbeResult]
    base: str
    dtype: torch.dtype | None = None
    rounded_base: bool = False
    trust_remote_code: bool = False

    @property
    def variables(self) -> Mapping[str, Any]:
        """Variables of the chat template."""
        return self.encoder.template.kwargs

    @property
    def end_names(self) -> list[str]:
        """The tokens at which the run stops."""
        tokenizer = self.encoder.tokenizer
        return [str(tokenizer.convert_ids_to_tokens(i)) for i in self.encoder.end_ids]


def check_types(types: Sequence[str], llama: LlamaCpp | None) -> None:
    """Raise UserError for GGUF types that are unknown or that nothing here can write."""
    for file_type in types:
        check_type(file_type)
        if file_type not in DIRECT_TYPES:
            check_quantizer(file_type, llama)


def write_gguf_files(
    folder: Path,
    name: str,
    types: Sequence[str],
    encoder: Encoder,
    llama: LlamaCpp | None,
    progress: Progress = lambda text: None,
) -> list[str]:
    """Write a model folder as one GGUF file per type, each with an Ollama Modelfile.

    Returns notes on what the Modelfiles cannot express. Raises UserError.
    """
    check_types(types, llama)
    notes: list[str] = []
    for file_type in types:
        file = f"{name}-{file_type}.gguf"
        if file_type in DIRECT_TYPES:
            _write(folder, folder / file, file_type, encoder, progress)
        else:
            unrounded = folder / f".{name}.gguf"
            _write(folder, unrounded, lossless_type(folder), encoder, progress)
            progress(f"{file}: quantizing")
            quantize(unrounded, folder / file, file_type, llama)
            unrounded.unlink()
        adds_bos = bool(read_metadata(folder / file)["tokenizer.ggml.add_bos_token"])
        text, remarks = modelfile(file, encoder, adds_bos=adds_bos)
        modelfile_name = "Modelfile" if len(types) == 1 else f"Modelfile-{file_type}"
        (folder / modelfile_name).write_text(text, encoding="utf-8")
        notes += [note for note in remarks if note not in notes]
    return notes


def _write(
    folder: Path, target: Path, file_type: str, encoder: Encoder, progress: Progress
) -> None:
    def on_tensor(done: int, total: int) -> None:
        progress(f"{target.name.lstrip('.')}: {done} of {total} tensors")

    write_gguf(folder, target, file_type, end_ids=encoder.end_ids, on_tensor=on_tensor)


def verify_folder(
    folder: Path,
    reference: ReferenceRun,
    llama: LlamaCpp | None,
    vllm: str | None = None,
    progress: Progress = lambda text: None,
) -> list[Verification]:
    """Compare the model, or adapter, and each GGUF file of a folder with the run.

    vllm: the Python of an environment with vLLM, which then loads the model or adapter as well.
    """
    results: list[Verification] = []
    is_adapter = (folder / "adapter_config.json").is_file()
    if is_adapter or (folder / "config.json").is_file():
        results.append(_verify_transformers(folder, is_adapter, reference, progress))
        if vllm is not None:
            is_same = results[0].status == "verified"
            results.append(_verify_vllm(folder, is_adapter, is_same, reference, vllm, progress))
    results += [
        _verify_gguf(folder, path, reference, llama, progress)
        for path in sorted(folder.glob("*.gguf"))
    ]
    if not results:
        raise UserError(
            "there is nothing to verify: no config.json, adapter_config.json or *.gguf",
            code="export-missing",
            where=str(folder),
            fix="pass a folder that `valence export` wrote",
        )
    return results


def _verify_transformers(
    folder: Path, is_adapter: bool, reference: ReferenceRun, progress: Progress
) -> Verification:
    kind = "adapter" if is_adapter else "model"
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    name = f"{kind} folder"
    total = len(reference.probes)
    try:
        artifact = run_transformers(
            folder,
            reference.probes,
            reference.answers,
            variables=reference.variables,
            end_ids=reference.encoder.end_ids,
            base=reference.base if is_adapter else None,
            dtype=reference.dtype if is_adapter else None,
            trust_remote_code=reference.trust_remote_code,
            on_probe=lambda done: progress(f"{name}: {done} of {total} prompts"),
        )
    except SafetensorError as error:
        difference = ExportDifference(
            "weights-damaged",
            "error",
            f"the weights cannot be read ({error})",
            "export the run again",
        )
        return Verification(name, kind, "differs", size=size, differences=(difference,))
    except (OSError, ValueError, RuntimeError) as error:
        return Verification(name, kind, "not verified", reason=f"it cannot be loaded ({error})")
    return _compare(
        name,
        kind,
        reference,
        artifact,
        size=size,
        notes=_base_note(reference),
    )


def _verify_vllm(
    folder: Path,
    is_adapter: bool,
    is_same: bool,
    reference: ReferenceRun,
    python: str,
    progress: Progress,
) -> Verification:
    """is_same: whether the folder has the weights of the run."""
    name = f"{'adapter' if is_adapter else 'model'} folder in vLLM"
    total = len(reference.probes)
    dtype = _vllm_dtype(folder, reference)
    progress("starting vLLM")
    try:
        artifact = run_vllm(
            python,
            folder,
            reference.probes,
            reference.answers,
            decode=lambda ids: str(reference.encoder.tokenizer.decode(list(ids))),
            variables=reference.variables,
            end_ids=reference.encoder.end_ids,
            base=reference.base if is_adapter else None,
            dtype=dtype,
            trust_remote_code=reference.trust_remote_code,
            on_probe=lambda done: progress(f"{name}: {done} of {total} prompts"),
        )
    except UserError as error:
        if error.code == "vllm-broken":
            return Verification(
                name, "vllm", "not verified", reason=f"{error.message}; {error.fix}"
            )
        difference = ExportDifference(error.code, "error", error.message, error.fix or "")
        return Verification(name, "vllm", "differs", differences=(difference,))
    notes = _base_note(reference)
    if is_adapter:
        rank = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["r"]
        notes.append(
            "serve it with: vllm serve BASE --tokenizer FOLDER --enable-lora --max-lora-rank "
            f"{max(rank, 8)} --lora-modules NAME=FOLDER"
        )
    if dtype != "auto":
        notes.append(f"add --dtype {dtype} to `vllm serve`, which otherwise rounds the weights")
    if reference.variables:
        notes.append(f"send chat_template_kwargs {json.dumps(dict(reference.variables))}")
    if reference.answers[0].logits.shape[1] > MAX_LOGPROBS:
        notes.append(
            f"KL/token is computed from the {MAX_LOGPROBS} most likely tokens and the sum of the "
            "others"
        )
    error = 0.0 if is_same else None
    return _compare(name, "vllm", reference, artifact, weights_error=lambda: error, notes=notes)


def _vllm_dtype(folder: Path, reference: ReferenceRun) -> str:
    """vLLM rounds float32 weights to 16 bits unless it is started with --dtype float32."""
    path = folder / "config.json"
    if path.is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
        dtype = config.get("dtype", config.get("torch_dtype"))
    else:
        dtype = str(reference.dtype).removeprefix("torch.")
    return "float32" if dtype == "float32" else "auto"


def _compare(
    name: str, kind: str, reference: ReferenceRun, artifact: ArtifactResult, **options: Any
) -> Verification:
    """Compare an artifact with the run. options: those of ``compare``."""
    return compare(
        name,
        kind,
        reference.probes,
        reference.answers,
        artifact,
        end_names=reference.end_names,
        bos=reference.encoder.tokenizer.bos_token_id,  # type: ignore[arg-type]
        rounded_base=reference.rounded_base,
        **options,
    )


def _base_note(reference: ReferenceRun) -> list[str]:
    if not reference.rounded_base:
        return []
    return ["the run computes with a 4-bit base model, the export with its unquantized weights"]


def _verify_gguf(
    folder: Path, path: Path, reference: ReferenceRun, llama: LlamaCpp | None, progress: Progress
) -> Verification:
    kind = file_type_of(path) or path.stem.rpartition("-")[2].lower()
    size = path.stat().st_size
    if llama is None:
        reason = f"no llama.cpp found; {INSTALL}"
        return Verification(path.name, kind, "not verified", reason=reason, size=size)
    total = len(reference.probes)
    try:
        artifact = run_llama_cpp(
            llama,
            path,
            reference.probes,
            reference.answers,
            variables=reference.variables,
            end_ids=reference.encoder.end_ids,
            on_probe=lambda done: progress(f"{path.name}: {done} of {total} prompts"),
        )
    except UserError as error:
        if error.code == "llama-cpp-broken":
            return Verification(path.name, kind, "not verified", reason=error.message, size=size)
        difference = ExportDifference(error.code, "error", error.message, error.fix or "")
        return Verification(path.name, kind, "differs", size=size, differences=(difference,))
    has_weights = (folder / "config.json").is_file()
    notes = [*_base_note(reference), *_file_notes(folder, path)]
    if has_nfc_normalizer(reference.encoder.tokenizer):
        notes.append(
            "the run's tokenizer normalizes Unicode (NFC) and llama.cpp does not: normalize prompts"
        )
    if reference.variables:
        notes.append(
            "start llama-server with --chat-template-kwargs "
            f"'{json.dumps(dict(reference.variables))}', as in the recipe"
        )
    return _compare(
        path.name,
        kind,
        reference,
        artifact,
        size=size,
        weights_error=partial(max_tensor_error, folder, path) if has_weights else lambda: None,
        notes=notes,
    )


def _file_notes(folder: Path, path: Path) -> list[str]:
    """Properties of the file that may surprise."""
    if not (folder / "config.json").is_file():
        return []
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    metadata = read_metadata(path)
    notes: list[str] = []
    context = metadata.get(f"{metadata['general.architecture']}.context_length")
    if context is not None and context < config.get("max_position_embeddings", 0):
        notes.append(f"the context is limited to {context} tokens, the sliding window of the model")
    return notes


def write_report(folder: Path, results: Sequence[Verification], run: Mapping[str, Any]) -> None:
    """Write verification.json, and a section of the model card. run: facts on the run."""
    report = {"run": dict(run), "files": [result.as_dict() for result in results]}
    text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    write_atomically(folder / REPORT, text.encode(), folder)
    card = folder / "README.md"
    before = card.read_text(encoding="utf-8") if card.is_file() else ""
    before = before.partition(f"\n{SECTION}\n")[0].rstrip("\n")
    section = f"{before}\n\n{SECTION}\n\n{_markdown(results)}\n"
    write_atomically(card, section.encode(), folder)


COLUMNS = ("file", "prompts", "top token", "KL/token", "answers", "stops", "result")


def _cells(result: Verification) -> tuple[str, ...]:
    if not result.prompts:
        return (result.file, *("-" for _ in COLUMNS[2:]), result.status)
    return (
        result.file,
        f"{result.same_tokens}/{result.prompts}",
        f"{result.agreement:.1%}",
        f"{result.kl_mean:.1e}",
        f"{result.same_answers}/{result.prompts}",
        f"{result.stops}/{result.num_ends}",
        result.status,
    )


def table(results: Sequence[Verification]) -> Table:
    """The results for a terminal."""
    shown = Table(*COLUMNS, box=None, pad_edge=False)
    for result in results:
        shown.add_row(*_cells(result))
    return shown


def runtimes(results: Sequence[Verification]) -> list[str]:
    """The programs that ran the files, with their versions."""
    return list(dict.fromkeys(result.runtime for result in results if result.runtime))


def remarks(result: Verification) -> list[str]:
    """Findings, notes and reasons of a result, one sentence each."""
    sentences = [f"{f.severity}: {f.message}. Fix: {f.fix}" for f in result.differences]
    if result.reason:
        sentences.append(f"not verified: {result.reason}")
    return [*sentences, *(f"note: {note}" for note in result.notes)]


def _markdown(results: Sequence[Verification]) -> str:
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(_cells(result) for result in results)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.append(
        f"\nEach file was loaded with {' or '.join(runtimes(results)) or 'no program'}, and "
        "compared with the training run. The columns: prompts that become the same tokens; answer "
        "tokens of the run that are the most likely ones here too; mean KL divergence (nats); "
        "equal greedy answers; end tokens of the run at which generation stops."
    )
    for result in results:
        # messages quote chat templates, which may contain markup
        sentences = [escape(" ".join(text.split()), quote=False) for text in remarks(result)]
        lines += [f"- `{result.file}`: {sentence}" for sentence in sentences]
    return "\n".join(lines)
