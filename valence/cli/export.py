"""The command that writes a trained model for other programs, and verifies what it wrote."""

from __future__ import annotations

import gc
import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from valence.cli.common import (
    Nproc,
    RunArg,
    Step,
    TrustRemoteCode,
    allow_remote_code,
    app,
    console,
    json_console,
    processes,
)
from valence.cli.models import open_run_or_recipe
from valence.errors import UserError
from valence.files import check_path
from valence.reports.run_record import LOG
from valence.storage import lock_file
from valence.terminal import Terminal, print_message, write_line

if TYPE_CHECKING:
    from valence.apps.export.artifacts import ReferenceRun
    from valence.apps.export.verify import Verification
    from valence.distributed.process_group import Group

PLAIN_SECONDS = 5.0
VLLM_FIX = "set VALENCE_VLLM_PYTHON to the Python of an environment with vLLM"
WRITTEN_BEFORE = "an earlier export, which did not end, had already written the folder"

DIFFERS = 3
"""Exit status if an exported file answers differently from the run."""


@app.command()
def export(
    run_dir: RunArg,
    to: Annotated[Path, typer.Argument(metavar="FOLDER", help="New folder for the model.")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the adapter instead of merged weights.")
    ] = False,
    gguf: Annotated[
        list[str] | None,
        typer.Option(
            "--gguf",
            metavar="TYPE",
            help="Also write a GGUF file and an Ollama Modelfile: f32, f16, bf16, q8_0, q5_1, "
            "q5_0, q4_1, q4_0; with llama.cpp also q2_k to q6_k, such as q4_k_m. Can be "
            "repeated.",
        ),
    ] = None,
    step: Step = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify",
            help="Compare answers of the files with those of the run.",
        ),
    ] = True,
    vllm: Annotated[
        bool | None,
        typer.Option(
            "--vllm/--no-vllm",
            help="Also load FOLDER with vLLM. Default: if vLLM is installed here, or "
            "VALENCE_VLLM_PYTHON names a Python that has it.",
        ),
    ] = None,
    verify_only: Annotated[
        bool,
        typer.Option("--verify-only", help="Only verify the model and the *.gguf files in FOLDER."),
    ] = False,
    push: Annotated[
        str | None,
        typer.Option(
            "--push",
            metavar="OWNER/NAME",
            help="Upload FOLDER to this hub repository, if the verification finds no errors. A "
            "new repository is private.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --push: list the files, upload nothing.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print the verification as a JSON object. Other output goes to standard error.",
        ),
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    nproc: Nproc = None,
) -> None:
    """Write a run's model for transformers, vLLM, llama.cpp and Ollama, and verify it.

    The verification loads each file with the program that serves it, and compares its answers with
    those of the run. Exit status 3: a file answers differently.
    """
    messages = json_console() if as_json else console
    types = list(dict.fromkeys(kind.lower() for kind in gguf or []))
    _check_options(adapter, types, push, dry_run, verify_only, verify, vllm)
    with processes(nproc) as group, ExitStack() as stack:
        from valence.apps.export.artifacts import check_types
        from valence.apps.export.llama_cpp import find_llama_cpp
        from valence.distributed.process_group import run_on_first_rank

        llama = find_llama_cpp() if types or verify_only else None
        server_python = _find_vllm(vllm) if verify and group.size == 1 else None
        check_types(types, llama)
        if group.size > 1 and (types or verify_only):
            raise UserError(
                "GGUF files are written and verified in one process",
                code="option-conflict",
                where="--nproc",
                fix="remove --nproc, or run the command without a launcher such as torchrun",
            )
        if verify_only:
            _check_is_folder(to)
        else:
            run_on_first_rank(group, partial(_check_new_folder, to))
            run_on_first_rank(group, lambda: stack.enter_context(_locked(to)))
        with _progress(messages) as progress:
            progress(f"loading {run_dir}")
            run = _open(run_dir, step, trust_remote_code, group)
        _check_writes(run, run_dir, adapter, bool(types))
        settings = {
            "run": str(run_dir.resolve()),
            "started": run.model_writer.facts.get("started"),
            "step": run.step,
            "adapter": adapter,
            "gguf": types,
        }
        is_old = verify_only or run_on_first_rank(group, partial(_is_written, to, settings))
        notes = [WRITTEN_BEFORE] if is_old and not verify_only else []
        unverified = _reason_not_to_verify(run, group) if verify else None
        reference = None
        if verify and unverified is None:
            reference = _reference(run, messages)
        if not is_old:
            writer = replace(run.model_writer, log=run_dir / LOG)
            notes = _write(writer, to, adapter, types, run.prepared.encoder, llama, messages)
        if reference is not None and group.size == 1:
            reference = stack.enter_context(_with_sources(reference, run, run_dir, to, is_old))
        facts = {"name": run_dir.resolve().name, "step": run.step}
        del run  # its memory is needed for the models that are verified
        results: list[Verification] = []
        if reference is not None:
            results = _verify(to, reference, llama, server_python, facts, messages)
            if server_python is None and vllm is None:
                notes.append(_vllm_hint(run_dir, to, step))
        if group.rank == 0:
            _finish(to, results, notes, unverified, as_json, messages)
            differs = any(result.status == "differs" for result in results)
            if differs:
                if push:
                    message = f"not uploaded to {push}: a file answers differently from the run"
                    print_message(messages, message, "yellow")
                raise typer.Exit(DIFFERS)
            if push:
                retry = _command(run_dir, to, step, "--verify-only", "--push", push)
                _push(to, push, dry_run, messages, retry)


def _check_options(
    adapter: bool,
    types: Sequence[str],
    push: str | None,
    dry_run: bool,
    verify_only: bool,
    verify: bool,
    vllm: bool | None,
) -> None:
    """Raise UserError for options that exclude each other."""
    from valence.files import is_hub_id

    conflict = None
    if adapter and types:
        conflict = (
            "--adapter",
            "GGUF files contain merged weights, not an adapter",
            "remove --adapter or --gguf",
        )
    elif verify_only and types:
        conflict = (
            "--verify-only",
            "--verify-only writes no files, but --gguf asks for a GGUF file",
            "remove --gguf to verify the files in FOLDER, or remove --verify-only",
        )
    elif verify_only and not verify:
        conflict = (
            "--verify-only",
            "--verify-only cannot be combined with --no-verify",
            "remove --verify-only or --no-verify",
        )
    elif vllm and not verify:
        conflict = (
            "--vllm",
            "--vllm verifies the model with vLLM, but --no-verify turns verification off",
            "remove --vllm or --no-verify",
        )
    elif dry_run and push is None:
        conflict = (
            "--dry-run",
            "--dry-run has no effect without --push",
            "remove --dry-run, or add --push OWNER/NAME",
        )
    elif push is not None and (not is_hub_id(push) or push.count("/") != 1):
        conflict = (
            "--push",
            f"{push!r} is not the id of a repository",
            "write --push OWNER/NAME",
        )
    if conflict is not None:
        where, problem, fix = conflict
        raise UserError(problem, code="option-conflict", where=where, fix=fix)


def _open(run_dir: Path, step: str | None, trust_remote_code: bool, group: Group) -> Any:
    settings = allow_remote_code(trust_remote_code, [])
    return open_run_or_recipe(
        run_dir, settings, lists=_needed_lists(run_dir), step=step, group=group
    )


def _reason_not_to_verify(run: Any, group: Group) -> str | None:
    if run.prepared.method.is_reward_model:
        return "reward models generate no answers to compare"
    if group.size > 1:
        return (
            "several processes cannot verify; run the command without --nproc, with --verify-only"
        )
    return None


def _reference(run: Any, messages: Terminal) -> ReferenceRun:
    """The run's answers to the prompts of the verification."""
    from valence.apps.export.artifacts import ReferenceRun
    from valence.apps.export.probes import answer_probes, make_probes

    model, encoder = run.recipe.model, run.prepared.encoder
    probes = make_probes(encoder)
    policy = run.state.policy
    with (
        _progress(messages) as progress,
        run.state.evaluation_weights(),
        _evaluating(policy),
        policy.sampling(),
    ):
        answers = answer_probes(
            policy.model,
            probes,
            encoder.end_ids,
            on_probe=lambda done: progress(f"run: {done} of {len(probes)} prompts"),
        )
    return ReferenceRun(
        encoder=encoder,
        probes=probes,
        answers=answers,
        base=model.name,
        dtype=policy.causal.get_input_embeddings().weight.dtype,
        rounded_base=bool(model.quantize),
        trust_remote_code=model.trust_remote_code,
    )


@contextmanager
def _with_sources(
    reference: ReferenceRun, run: Any, run_dir: Path, to: Path, is_old: bool
) -> Iterator[ReferenceRun]:
    """The run with folders that have its weights, to compare files with.

    is_old: FOLDER may have been changed since it was written, so that the weights are written again
    next to it for the time of the block.
    """
    has_adapter = (to / "adapter_config.json").is_file()
    if not is_old:
        names = {"adapter": to} if has_adapter else {"merged": to}
        yield replace(reference, **names)
        return
    needs_merged = (to / "config.json").is_file() or any(to.glob("*.gguf"))
    writer = replace(run.model_writer, log=run_dir / LOG)
    try:
        place = TemporaryDirectory(dir=to.resolve().parent, prefix=f".{to.resolve().name}.")
    except OSError as error:
        raise _not_writable(to, error) from error
    with place as name:
        folders: dict[str, Path] = {}
        for kind, is_needed in {"merged": needs_merged, "adapter": has_adapter}.items():
            if is_needed:
                folders[kind] = Path(name, kind)
                writer.write(folders[kind], kind)
        yield replace(reference, **folders)


@contextmanager
def _evaluating(policy: Any) -> Iterator[None]:
    """The policy without dropout inside the block."""
    was_training = policy.training
    policy.eval()
    try:
        yield
    finally:
        policy.train(was_training)


@contextmanager
def _progress(messages: Terminal) -> Iterator[Callable[[str], None]]:
    """A function that shows the current activity: on a terminal as a line that changes, elsewhere
    as a plain line at most every ``PLAIN_SECONDS`` seconds.
    """
    from rich.text import Text

    from valence.reports.console import can_draw

    if can_draw(messages):
        with messages.status("") as status:
            yield lambda text: status.update(Text(text))
        return
    printed_at = time.monotonic()

    def print_sometimes(text: str) -> None:
        nonlocal printed_at
        if time.monotonic() - printed_at >= PLAIN_SECONDS:
            printed_at = time.monotonic()
            print_message(messages, text)

    yield print_sometimes


def _write(
    writer: Any,
    to: Path,
    adapter: bool,
    types: Sequence[str],
    encoder: Any,
    llama: Any,
    messages: Terminal,
) -> list[str]:
    """Write the folder, which gets its name once it is complete."""
    from valence.apps.export.artifacts import write_gguf_files
    from valence.storage import atomic_folder

    if not types:
        writer.write(to, "adapter" if adapter else "merged")
        return []
    with atomic_folder(to) as folder, _progress(messages) as progress:
        progress("writing the model folder")
        writer.write(folder, "merged")
        return write_gguf_files(folder, to.resolve().name, types, encoder, llama, progress)


def _find_vllm(vllm: bool | None) -> str | None:
    """The Python that runs vLLM; None if it is not wanted. Raises UserError if it is missing."""
    from valence.apps.export.vllm import find_vllm

    python = None if vllm is False else find_vllm()
    if vllm and python is None:
        raise UserError(
            "vLLM is not installed in this environment",
            code="library-missing",
            where="--vllm",
            fix=VLLM_FIX,
        )
    return python


def _command(run_dir: Path, to: Path, step: str | None, *options: str) -> str:
    """The command line of an export of this run to this folder."""
    steps = ["--step", step] if step else []
    return shlex.join(["valence", "export", str(run_dir), str(to), *steps, *options])


def _vllm_hint(run_dir: Path, to: Path, step: str | None) -> str:
    command = _command(run_dir, to, step, "--verify-only", "--vllm")
    return (
        f"the folder was not loaded with vLLM, which is not installed in this environment. To "
        f"verify it with vLLM, {VLLM_FIX}, and run: {command}"
    )


def _verify(
    to: Path,
    reference: ReferenceRun,
    llama: Any,
    vllm: str | None,
    facts: dict[str, Any],
    messages: Terminal,
) -> list[Verification]:
    import torch

    from valence.apps.export.artifacts import verify_folder, write_report

    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()  # for the vLLM server
    with _progress(messages) as progress:
        results = verify_folder(to, reference, llama, vllm, progress)
    write_report(to, results, facts)
    return results


def _finish(
    to: Path,
    results: Sequence[Verification],
    notes: Sequence[str],
    unverified: str | None,
    as_json: bool,
    messages: Terminal,
) -> None:
    """Print the folder, what was verified, and what was not."""
    from valence.apps.export.artifacts import remarks, runtimes, table

    if as_json:
        files = [result.as_dict() for result in results]
        write_line(json.dumps({"folder": str(to), "files": files, "notes": list(notes)}))
    print_message(messages, str(to))
    if results:
        messages.print(table(results))
        for runtime in runtimes(results):
            print_message(messages, f"loaded with {runtime}", "dim")
    elif unverified:
        print_message(messages, f"not verified: {unverified}", "yellow")
    for result in results:
        for text in remarks(result):
            style = "red" if text.startswith("error") else "yellow"
            print_message(messages, f"{result.file}: {text}", style)
    for note in notes:
        print_message(messages, f"note: {note}", "yellow")


def _push(folder: Path, repository: str, dry_run: bool, messages: Terminal, retry: str) -> None:
    """Upload a folder to the Hugging Face hub. retry: the command that uploads it later."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if dry_run:
        for path in files:
            size = path.stat().st_size
            print_message(messages, f"would upload {path.relative_to(folder)} ({size} bytes)")
        return
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    from valence.training.model_files import portable_settings

    try:
        api = HfApi()
        api.create_repo(repository, private=True, exist_ok=True)
        portable = portable_settings(folder)
        for name, text in portable.items():
            api.upload_file(path_or_fileobj=text.encode(), path_in_repo=name, repo_id=repository)
        url = api.upload_folder(
            repo_id=repository, folder_path=folder, ignore_patterns=list(portable)
        )
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise UserError(
            f"the folder cannot be uploaded to {repository} ({error})",
            code="upload-failed",
            where="--push",
            fix=f"check the network, log in with `hf auth login`, then run: {retry}",
        ) from error
    print_message(messages, str(url))


def _check_writes(run: Any, run_dir: Path, adapter: bool, is_gguf: bool) -> None:
    """Raise UserError for a model that cannot be written in this form."""
    if is_gguf:
        from valence.apps.export.gguf_file import architecture_of

        if run.prepared.method.is_reward_model:
            raise UserError(
                "a reward model cannot be exported as a GGUF file",
                code="gguf-architecture-unsupported",
                where=str(run_dir),
                fix="remove --gguf; to serve this model, use `valence serve --reward`",
            )
        architecture_of(run.state.policy.causal.config)
    if adapter and run.prepared.method.is_reward_model:
        raise UserError(
            "the adapter of a reward model cannot be exported: it does not include the head",
            code="adapter-not-exportable",
            where=str(run_dir),
            fix="remove --adapter to export the merged model",
        )
    if adapter and run.recipe.model.lora is None and run.recipe.model.adapter is None:
        raise UserError(
            "the run trained all weights and has no adapter",
            code="adapter-missing",
            where=str(run_dir),
            fix="remove --adapter",
        )


def _needed_lists(run_dir: Path) -> tuple[Literal["train"], ...]:
    """The lists of rows that an export needs.

    A reward model is saved with the mean and standard deviation of its scores of training rows.
    """
    from valence.targets import method_of_run

    return ("train",) if method_of_run(run_dir).is_reward_model else ()


def _check_is_folder(folder: Path) -> None:
    check_path(folder)
    if not folder.is_dir():
        raise UserError(
            "the path is a file" if folder.exists() else "the folder does not exist",
            code="path-missing",
            where=str(folder),
            fix="use a folder that `valence export` wrote",
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Inside the block, no other export writes this folder. Raises UserError."""
    with ExitStack() as stack:
        try:
            is_locked = stack.enter_context(lock_file(_lock_path(folder)))
        except OSError as error:
            raise _not_writable(folder, error) from error
        if not is_locked:
            raise UserError(
                "another export is writing this folder",
                code="output-locked",
                where=str(folder),
                fix="wait until it ends, or choose another folder",
            )
        yield


def _lock_path(folder: Path) -> Path:
    path = folder.resolve()
    return path.with_name(f".{path.name}.lock")


def _is_written(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Whether an export with these settings, which was killed afterwards, wrote this folder.

    Such an export left its settings in the lock. Raises UserError for another folder.
    """
    lock, text = _lock_path(folder), json.dumps(settings)
    try:
        if not folder.exists():
            lock.write_text(text, encoding="utf-8")
            return False
        if lock.read_bytes() == text.encode():
            return True
    except OSError as error:
        raise _not_writable(folder, error) from error
    raise _path_exists(folder)


def _not_writable(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"the folder cannot be written ({error.strerror})",
        code="folder-not-writable",
        where=str(folder),
        fix="free disk space, or choose a path where you have write permission",
    )


def _check_new_folder(folder: Path) -> None:
    """Raise UserError for a folder that cannot be created."""
    check_path(folder)
    if folder.exists():
        if _lock_path(folder).exists():  # of a killed export, which may have written this folder
            return
        raise _path_exists(folder)
    try:
        folder.mkdir(parents=True)
        folder.rmdir()
    except OSError as error:
        raise _not_writable(folder, error) from error


def _path_exists(folder: Path) -> UserError:
    kind, verify = "file", ""
    if folder.is_dir():
        kind, verify = "folder", ", or verify this folder with --verify-only (without --gguf)"
    return UserError(
        f"the {kind} already exists",
        code="path-exists",
        where=str(folder),
        fix=f"choose a path that does not exist{verify}",
    )
