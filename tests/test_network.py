"""Servers near and far, where the environment names a proxy."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator

import pytest

from tests.errors import raises_error
from tests.rewards.kit import answers, error, reward, values
from tests.rewards.kit import server as reward_server
from tests.rollouts.vllm_server import END, PROMPTS, Completions, Words, serving
from valence.rollouts.client import ServerClient, ServerLost
from valence.rollouts.openai import OpenAIGenerator
from valence.rollouts.protocol import Sampling


@pytest.fixture(params=["HTTP_PROXY", "ALL_PROXY"])
def proxy_requests(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[str]]:
    """First lines of what a proxy was asked, which it never answers."""
    lines: list[str] = []

    class Proxy(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            lines.append(self.rfile.readline().decode().strip())

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, args=(0.01,), daemon=True).start()
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.lower(), raising=False)
        for name in {request.param, "HTTPS_PROXY"}:
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.server_address[1]}")
        monkeypatch.setenv("NO_PROXY", "near.invalid")
        yield lines
        proxy.shutdown()


def test_what_is_near_is_asked_directly(proxy_requests: list[str]) -> None:
    with serving(Completions(speaks=True)) as fake:
        sampler = OpenAIGenerator(fake.url, Words(), end_ids=[END], timeout=5.0)  # type: ignore[arg-type]
        assert len(sampler.generate(PROMPTS, 1, Sampling(seed=1))) == 2
        assert ServerClient(fake.url, 5.0).is_healthy()
    with reward_server() as server:
        assert values(reward(server.url), answers(2)) == [0.0, 1.0]
    assert proxy_requests == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:9"),
        ("ALL_PROXY", "socks://127.0.0.1:9"),
        ("NO_PROXY", "localhost,[::1]"),
        ("SSL_CERT_FILE", "nowhere.pem"),
    ],
)
def test_what_cannot_be_used_matters_to_what_is_far_alone(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with serving(Completions(speaks=True)) as fake, reward_server() as server:
        assert ServerClient(fake.url, 5.0).is_healthy()
        assert values(reward(server.url), answers(1)) == [0.0]
    with raises_error("network-environment", where="https://far.invalid", fix=name):
        ServerClient("https://far.invalid", 5.0)


@pytest.mark.filterwarnings("ignore::UserWarning")  # a server that is lost is asked again
def test_what_is_far_is_asked_through_the_proxy(proxy_requests: list[str]) -> None:
    with pytest.raises(ServerLost):
        ServerClient("https://far.invalid", 5.0).get("/v1/models")
    assert proxy_requests == ["CONNECT far.invalid:443 HTTP/1.1"]
    error(reward("https://far.invalid/get_reward", retries=0), answers(1))
    assert proxy_requests[1:] == ["CONNECT far.invalid:443 HTTP/1.1"]
