"""Write the GGUF files of an exported folder, and verify everything in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from safetensors import SafetensorError

from valence.apps.export.contents import folder_differences, gguf_differences, is_compared
from valence.apps.export.gguf_file import (
    DIRECT_TYPES,
    check_type,
    file_type_of,
    lossless_type,
    read_metadata,
    write_gguf,
)
from valence.apps.export.gguf_tokenizer import has_nfc_normalizer
from valence.apps.export.llama_cpp import (
    INSTALL,
    LlamaCpp,
    check_quantizer,
    quantize,
    run_llama_cpp,
)
from valence.apps.export.ollama import modelfile
from valence.apps.export.probes import ArtifactResult, Probe, ProbeResult, run_transformers
from valence.apps.export.verify import ExportDifference, Verification, compare
from valence.apps.export.vllm import MAX_LOGPROBS, run_vllm
from valence.data.encode import Encoder
from valence.errors import UserError
from valence.storage import atomic_write, read_json

REPORT = "verification.json"
SECTION = "## Verification"
CONTENTS = ("settings-differ", "tensors-differ", "stop-token-added")
"""Differences of a folder that concern every program that loads it."""
Progress = Callable[[str], None]
"""Receives a short description of what is being done."""


@dataclass(frozen=True)
class ReferenceRun:
    """The run that exported files are compared with: its prompts and its answers.

    base: the base model, which the run holds in ``dtype``. rounded_base: the
    run computed with a 4-bit base model, and the export has that model's unquantized weights.
    merged, adapter: folders with the run's merged weights, and with its adapter, that were written
    just now.
    """

    encoder: Encoder
    probes: Sequence[Probe]
    answers: Sequence[ProbeResult]
    base: str
    dtype: torch.dtype | None = None
    rounded_base: bool = False
    trust_remote_code: bool = False
    merged: Path | None = None
    adapter: Path | None = None

    @property
    def variables(self) -> Mapping[str, Any]:
        """Variables of the chat template."""
        return self.encoder.template.kwargs

    @property
    def end_names(self) -> list[str]:
        """The tokens at which the run stops."""
        return _names_of(self.encoder.tokenizer, self.encoder.end_ids)


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
            results.append(_verify_vllm(folder, is_adapter, results[0], reference, vllm, progress))
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
    progress(f"{name}: comparing weights and settings")
    source = reference.adapter if is_adapter else reference.merged
    contents = _base_differences(folder) if is_adapter else []
    try:
        if source is not None and source != folder:
            contents += folder_differences(source, folder)
        artifact = run_transformers(
            folder,
            reference.probes,
            reference.answers,
            variables=reference.variables,
            end_ids=reference.encoder.end_ids,
            is_adapter=is_adapter,
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
        # a folder that was written just now was complete: memory or a library is missing
        if not is_adapter:
            reason = f"it cannot be loaded ({error})"
            return Verification(name, kind, "not verified", reason=reason, size=size)
        return _unloadable(name, kind, size, error)
    return _compare(
        name,
        kind,
        reference,
        artifact,
        size=size,
        contents=contents,
        other_stops=[
            (text, False) for text in _names_of(reference.encoder.tokenizer, artifact.other_stops)
        ],
        notes=_base_note(reference),
    )


def _unloadable(name: str, kind: str, size: int, error: Exception) -> Verification:
    if isinstance(error, torch.OutOfMemoryError):
        return Verification(name, kind, "not verified", reason=str(error), size=size)
    difference = ExportDifference(
        "adapter-not-loadable",
        "error",
        f"AutoPeftModelForCausalLM cannot load the folder ({type(error).__name__})",
        "set base_model_name_or_path in adapter_config.json to the folder or the hub id of the "
        "base model",
    )
    return Verification(name, kind, "differs", size=size, differences=(difference,))


def _names_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    return [str(tokenizer.convert_ids_to_tokens(i)) for i in ids]


def _verify_vllm(
    folder: Path,
    is_adapter: bool,
    loaded: Verification,
    reference: ReferenceRun,
    python: str,
    progress: Progress,
) -> Verification:
    """loaded: the verification of the folder in transformers."""
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
        rank = read_json(folder / "adapter_config.json")["r"]
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
    return _compare(
        name,
        "vllm",
        reference,
        artifact,
        weights_error=0.0 if loaded.status == "verified" else None,
        contents=[d for d in loaded.differences if d.code in CONTENTS],
        notes=notes,
    )


def _vllm_dtype(folder: Path, reference: ReferenceRun) -> str:
    """vLLM rounds float32 weights to 16 bits unless it is started with --dtype float32."""
    path = folder / "config.json"
    if path.is_file():
        config = read_json(path)
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
    progress(f"{path.name}: comparing fields and tensors")
    contents, error, notes = _gguf_contents(path, reference)
    status = "differs" if contents else "not verified"
    if llama is None:
        reason = f"no llama.cpp found; {INSTALL}"
        return Verification(
            path.name, kind, status, reason=reason, size=size, differences=tuple(contents)
        )
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
    except UserError as failure:
        if failure.code == "llama-cpp-broken":
            return Verification(
                *(path.name, kind, status),
                reason=failure.message,
                size=size,
                differences=tuple(contents),
            )
        difference = ExportDifference(failure.code, "error", failure.message, failure.fix or "")
        return Verification(path.name, kind, "differs", size=size, differences=(difference,))
    notes += [*_base_note(reference), *_file_notes(folder, path)]
    tokenizer: Any = reference.encoder.tokenizer
    special_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    if has_nfc_normalizer(tokenizer):
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
        weights_error=error,
        contents=contents,
        other_stops=list(
            zip(
                _names_of(tokenizer, artifact.other_stops),
                (i in special_ids for i in artifact.other_stops),
                strict=True,
            )
        ),
        notes=notes,
    )


def _base_differences(folder: Path) -> list[ExportDifference]:
    """Whether another directory is enough for an adapter not to find its base model."""
    config = read_json(folder / "adapter_config.json")
    base = Path(str(config.get("base_model_name_or_path")))
    if base.is_absolute() or not base.is_dir():
        return []
    return [
        ExportDifference(
            "adapter-not-loadable",
            "error",
            f"adapter_config.json names the base model by a path within {Path.cwd().name}",
            f"set base_model_name_or_path in adapter_config.json to {base.absolute().name} with "
            "its full path",
        )
    ]


def _gguf_contents(
    path: Path, reference: ReferenceRun
) -> tuple[list[ExportDifference], float | None, list[str]]:
    """Differences of a file's contents, its largest error of a tensor, and notes."""
    if reference.merged is None or not is_compared(reference.merged):
        note = "Valence does not convert this architecture: only the answers were compared"
        return [], None, [note]
    try:
        return *gguf_differences(
            reference.merged, path, reference.encoder.tokenizer, reference.encoder.end_ids
        ), []
    except UserError as error:  # of another tokenizer than llama.cpp knows
        return [], None, [f"only the answers were compared: {error.message}"]
    except (ValueError, IndexError, KeyError, OSError) as error:
        difference = ExportDifference(
            "file-damaged", "error", f"the file cannot be read ({error})", "write the file again"
        )
        return [difference], None, []


def _file_notes(folder: Path, path: Path) -> list[str]:
    """Properties of the file that may surprise."""
    if not (folder / "config.json").is_file():
        return []
    config = read_json(folder / "config.json")
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
    atomic_write(folder / REPORT, text)
    card = folder / "README.md"
    before = card.read_text(encoding="utf-8") if card.is_file() else ""
    before = before.partition(f"\n{SECTION}\n")[0].rstrip("\n")
    section = f"{before}\n\n{SECTION}\n\n{_markdown(results)}\n"
    atomic_write(card, section)


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
