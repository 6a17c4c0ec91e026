"""Serve a model to Open WebUI, chat and vote there, import the votes, audit them, train and sample.

Open WebUI runs in a separate environment, which `make open-webui` builds. Two users chat through
its API, each with half of the questions, and like the shorter half of their answers. Then one of
them changes a vote and deletes another one, and a second import follows.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import httpx

from examples.demo.assets import smollm2
from examples.quickstart.make_feedback import read_prompts

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
QUESTIONS = HERE.parent / "quickstart" / "prompts.jsonl"
PYTHON = "VALENCE_OPEN_WEBUI_PYTHON"
"""Environment variable that names the interpreter of another environment with Open WebUI."""
NO_OPEN_WEBUI = (
    f"there is no environment with Open WebUI: `make open-webui` builds one in .peers/open_webui "
    f"(about 800 MB), or {PYTHON} names its Python"
)
SETTINGS = {
    "USE_SLIM_DOCKER": "true",  # without the local models for speech and retrieval
    "OFFLINE_MODE": "true",
    "ENABLE_VERSION_UPDATE_CHECK": "false",
    "ENABLE_OLLAMA_API": "false",
}
"""Environment of the Open WebUI server."""
NUM_QUESTIONS = 12
NEW_TOKENS = 48
PATIENCE = 120.0
"""Seconds until a server must have started, or must have answered."""


def open_webui_python() -> Path:
    """The interpreter of the environment with Open WebUI, which may not exist."""
    return Path(os.environ.get(PYTHON) or ROOT / ".peers" / "open_webui" / "bin" / "python")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.open_webui", description=__doc__)
    parser.add_argument("--model", type=Path, help="a chat model's folder; default: SmolLM2-135M")
    parser.add_argument("--out", type=Path, default=Path("runs/open_webui"), help="folder to write")
    options = parser.parse_args()
    if not open_webui_python().exists():
        sys.exit(NO_OPEN_WEBUI)
    model = (options.model or smollm2()).resolve()
    if options.out.exists():
        print(f"Removing the earlier results in {options.out}.")
        shutil.rmtree(options.out)
    options.out.mkdir(parents=True)
    with (
        TemporaryDirectory(prefix="open-webui-") as data,
        serve_model(model, options.out, Path(data)) as (model_url, token),
        start_open_webui(Path(data), model_url, token) as url,
    ):
        collect_votes(url, options.out)
    valence(options.out, "audit", "feedback.jsonl")
    shutil.copy(HERE / "recipe.yaml", options.out)
    valence(options.out, "train", "recipe.yaml", f"model.name={model}")
    question = "What is a good gift for a gardener? Keep it short."
    valence(options.out, "sample", "run", "--prompt", question, "data.as_chat=true")
    print(f"\nRows    {options.out / 'feedback.jsonl'}")
    print(f"Report  {options.out / 'run' / 'report.html'}  (open it in a browser)")
    print(f"{NUM_QUESTIONS} votes show the way; docs/start.md says how many make a better model.")


def collect_votes(url: str, out: Path) -> None:
    """Chat and vote as two users, and import the votes twice."""
    admin = sign_up(url)
    users = [admin, add_user(admin)]
    questions = [prompt.messages[-1]["content"] for prompt in read_prompts(QUESTIONS)]
    feedback: list[str] = []
    for number, user in enumerate(users, 1):
        chats = [chat(user, question) for question in questions[number - 1 : NUM_QUESTIONS : 2]]
        by_length = sorted(chats, key=lambda record: len(answer_of(record)["content"].split()))
        liked = {record["id"] for record in by_length[: len(chats) // 2]}
        feedback += [vote(user, record, record["id"] in liked) for record in chats]
        print(
            f"User {number}: {len(chats)} chats, {len(liked)} liked, {len(chats) - len(liked)} not"
        )

    export = admin.get("/api/v1/evaluations/feedbacks/all/export").raise_for_status()
    (out / "export.json").write_bytes(export.content)
    valence(out, "import", "open-webui", "export.json", "--out", "feedback.jsonl")

    path = f"/api/v1/evaluations/feedback/{feedback[0]}"
    record = users[0].get(path).raise_for_status().json()
    record["data"]["rating"] = -record["data"]["rating"]
    users[0].post(path, json=record).raise_for_status()
    users[0].delete(f"/api/v1/evaluations/feedback/{feedback[1]}").raise_for_status()
    print(
        "\nUser 1 changes one vote and deletes another one. Import again, from the server itself:"
    )
    key = admin.headers["authorization"].removeprefix("Bearer ")
    valence(
        out, "import", "open-webui", "--url", url, "--complete", "--out", "feedback.jsonl",
        environment={"OPEN_WEBUI_API_KEY": key},
    )  # fmt: skip


def valence(folder: Path, *words: str, environment: dict[str, str] | None = None) -> None:
    """Show and run a command of Valence in a folder. Ends this program if it fails."""
    print(f"\n$ valence {shlex.join(words)}", flush=True)
    command = [sys.executable, "-m", "valence", *words]
    status = subprocess.run(command, cwd=folder, env=command_environment(environment), check=False)
    if status.returncode:
        sys.exit(f"`valence {words[0]}` ended with status {status.returncode}")


def command_environment(changes: dict[str, str] | None = None) -> dict[str, str]:
    """The environment of Valence's commands, which run in another folder than this program."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **(changes or {})}


# Servers


@contextmanager
def serve_model(model: Path, out: Path, data: Path) -> Iterator[tuple[str, str]]:
    """Serve a model with `valence collect`. Yields its OpenAI-compatible address and its token."""
    words = ("collect", str(model), "--out", "served.jsonl", "--port", "0")
    words += ("--max-new-tokens", str(NEW_TOKENS))
    print(f"$ valence {shlex.join(words)}", flush=True)
    log = data / "collect.log"
    with running(
        [sys.executable, "-m", "valence", *words], log, out, command_environment()
    ) as process:
        while not (link := re.search(r"^(http://\S+)/#token=(\S+)$", log.read_text(), re.M)):
            wait(process, log)
        yield f"{link[1]}/v1", link[2]


@contextmanager
def start_open_webui(data: Path, model_url: str, token: str) -> Iterator[str]:
    """Start Open WebUI with its files in a folder. Yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", data / "open_webui.log"
    environment = {
        **{name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ},
        **SETTINGS,
        "DATA_DIR": str(data),
        "WEBUI_SECRET_KEY": secrets.token_hex(32),
        "OPENAI_API_BASE_URL": model_url,
        "OPENAI_API_KEY": token,
    }
    program = open_webui_python().with_name("open-webui")
    print(f"Starting Open WebUI at {url}", flush=True)
    command = [str(program), "serve", "--host", "127.0.0.1", "--port", str(port)]
    with running(command, log, data, environment) as process:
        while not is_up(url):
            wait(process, log)
        yield url


@contextmanager
def running(
    command: Sequence[str], log: Path, folder: Path, environment: dict[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
    """A program that is stopped in the end, and when it must have started."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield process, time.monotonic() + PATIENCE
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait(started: tuple[subprocess.Popen[bytes], float], log: Path) -> None:
    """Wait for a moment. Ends this program if the other one has ended, or takes too long."""
    process, until = started
    if process.poll() is not None or time.monotonic() > until:
        sys.exit(f"a server did not start:\n{log.read_text(errors='replace')[-2000:]}")
    time.sleep(0.2)


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).is_success
    except httpx.HTTPError:
        return False


# Users of Open WebUI


def sign_up(url: str) -> httpx.Client:
    """A client of the first user, who is the administrator."""
    client = httpx.Client(base_url=url, timeout=PATIENCE)
    account = {"name": "One", "email": "one@example.com", "password": secrets.token_hex(16)}
    reply = client.post("/api/v1/auths/signup", json=account).raise_for_status()
    client.headers["authorization"] = f"Bearer {reply.json()['token']}"
    return client


def add_user(admin: httpx.Client) -> httpx.Client:
    """A client of another user."""
    account = {"name": "Two", "email": "two@example.com", "password": secrets.token_hex(16)}
    reply = admin.post("/api/v1/auths/add", json={**account, "role": "admin"}).raise_for_status()
    headers = {"authorization": f"Bearer {reply.json()['token']}"}
    return httpx.Client(base_url=admin.base_url, timeout=PATIENCE, headers=headers)


def chat(user: httpx.Client, question: str) -> dict[str, Any]:
    """Ask a question, and save the chat as Open WebUI's page does. Returns Open WebUI's record."""
    model = user.get("/api/models").raise_for_status().json()["data"][0]["id"]
    messages = [{"role": "user", "content": question}]
    body = {"model": model, "messages": messages, "stream": False}
    reply = user.post("/api/chat/completions", json=body).raise_for_status().json()
    question_id, answer_id = str(uuid4()), str(uuid4())
    history = {
        question_id: {
            "id": question_id, "parentId": None, "childrenIds": [answer_id], **messages[0],
        },
        answer_id: {
            "id": answer_id, "parentId": question_id, "childrenIds": [], "role": "assistant",
            "content": reply["choices"][0]["message"]["content"], "model": model, "done": True,
        },
    }  # fmt: skip
    content = {"title": question, "models": [model]}
    content["history"] = {"currentId": answer_id, "messages": history}
    return user.post("/api/v1/chats/new", json={"chat": content}).raise_for_status().json()


def answer_of(record: dict[str, Any]) -> dict[str, Any]:
    history = record["chat"]["history"]
    return history["messages"][history["currentId"]]


def vote(user: httpx.Client, record: dict[str, Any], is_liked: bool) -> str:
    """Give the answer of a chat a thumb. Returns the id of the feedback."""
    answer = answer_of(record)
    body = {
        "type": "rating",
        "data": {"rating": 1 if is_liked else -1, "model_id": answer["model"]},
        "meta": {"chat_id": record["id"], "message_id": answer["id"], "model_id": answer["model"]},
        "snapshot": {"chat": record},
    }
    reply = user.post("/api/v1/evaluations/feedback", json=body).raise_for_status()
    return reply.json()["id"]


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped")
    except httpx.HTTPError as error:
        sys.exit(f"Open WebUI failed: {error}")
