"""Misbehaving HTTP clients: endless headers, slow or malformed requests, wrong hosts, and many
connections.
"""

from __future__ import annotations

import contextlib
import json
import random
import select
import socket
from collections.abc import Iterator

import pytest

from tests.rewards.kit import wait_for
from tests.rewards.reward_servers import Numbers, Served, hash_score, http_get, served
from valence.apps.serve import http_server
from valence.apps.serve.http_server import MAX_HEADERS, host_names, is_allowed_host
from valence.apps.serve.reward_batches import Limits

GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
BODY = json.dumps({"query": ["a"]}).encode()
POST = b"POST /get_reward HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
GOOD = POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.fixture(scope="module")
def plain() -> Iterator[Served]:
    with served(Numbers(), Limits(timeout=5.0, max_body=100_000)) as server:
        yield server


@pytest.fixture(scope="module")
def hasty() -> Iterator[Served]:
    """Closes connections that are slow after 0.5 s."""
    with served(Numbers(), Limits(timeout=0.5)) as server:
        yield server


def exchange(server: Served, *parts: bytes) -> bytes:
    """All that the server says to this until it closes the connection, or is silent for long."""
    with server.raw() as connection:
        connection.settimeout(20)
        reply = b""
        with contextlib.suppress(ConnectionError):
            for part in parts:
                connection.sendall(part)
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(65536):
                reply += part
    return reply


def status(reply: bytes) -> int:
    return int(reply.split()[1]) if reply else 0


def still_serves(server: Served) -> None:
    assert server.post(query=["still there"]).json()["rewards"] == [hash_score("still there")]


# Heads that are too large


def endless(
    server: Served, start: bytes, part: bytes, maximum: int = 50_000_000
) -> tuple[int, bytes]:
    """Sends parts for as long as they are taken: how many bytes were, and the reply."""
    sent, reply = 0, b""
    with server.raw() as connection:
        connection.settimeout(20)
        with contextlib.suppress(ConnectionError):
            connection.sendall(start)
            while sent < maximum:
                connection.sendall(part)
                sent += len(part)
        with contextlib.suppress(ConnectionError):
            reply = connection.recv(65536)
    return sent, reply


@pytest.mark.parametrize(
    ("start", "part"),
    [
        (GET + b"x: ", b"y" * 100_000),
        (GET, b"x: y\r\n" * 10_000),
        (b"", b"G" * 100_000),
        (b"GET /", b"x" * 100_000),
        (GET + b"x: y\r\n", b" folded\r\n" * 10_000),
        (POST + b"transfer-encoding: chunked\r\n\r\n1;x=", b"y" * 100_000),
        (POST + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n", b"x: y\r\n" * 10_000),
    ],
)
def test_a_head_without_end_is_not_read(plain: Served, start: bytes, part: bytes) -> None:
    sent, reply = endless(plain, start, part)
    assert sent < 20_000_000  # what the buffers of two sockets on one machine hold
    # the reply may be lost with the connection, as more had been sent
    assert status(reply) in (
        0,
        400,
        431,
    )
    wait_for(lambda: plain.service.bodies.num_bytes == 0)
    still_serves(plain)


def test_heads_have_so_many_bytes_and_so_many_headers(plain: Served) -> None:
    def reply(*headers: bytes) -> int:
        return status(exchange(plain, GET + b"connection: close\r\n" + b"".join(headers) + b"\r\n"))

    assert reply(b"x: " + b"y" * 60_000 + b"\r\n") == 200
    assert reply(b"x: " + b"y" * 66_000 + b"\r\n") == 431
    assert reply(b"x: " + b"y" * 200_000 + b"\r\n") == 431
    assert reply(*[b"x: y\r\n"] * (MAX_HEADERS - 2)) == 200
    assert reply(*[b"x: y\r\n"] * (MAX_HEADERS - 1)) == 431
    assert (
        status(exchange(plain, b"GET /" + b"x" * 66_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"))
        == 431
    )


def test_the_limit_holds_before_the_token_is_asked_for() -> None:
    with served(Numbers(), token="s3cret") as server:
        reply = exchange(server, POST + b"x: " + b"y" * 66_000 + b"\r\n\r\n")
        assert status(reply) == 431
        assert "error" in json.loads(reply.partition(b"\r\n\r\n")[2])


# Clients that are slow


@pytest.mark.parametrize("parts", [
    [], [b"G"], [GET], [GET + b"x: "], [GOOD, b"P"], [GOOD, GET],
])  # fmt: skip
def test_a_head_that_does_not_come_is_not_waited_for(hasty: Served, parts: list[bytes]) -> None:
    reply = exchange(hasty, *parts)  # until the server closes the connection
    assert status(reply) == (200 if parts[:1] == [GOOD] else 408 if parts else 0)


def drip(connection: socket.socket, part: bytes) -> None:
    """Sends this again and again, slowly, until the server closes the connection."""
    with contextlib.suppress(ConnectionError):
        for _ in range(3000):
            connection.sendall(part)
            if select.select([connection], [], [], 0.02)[0] and not connection.recv(65536):
                return
        pytest.fail("the server goes on to read")


def test_a_head_that_comes_byte_by_byte_is_not_waited_for(hasty: Served) -> None:
    with hasty.raw() as connection:
        drip(connection, b"G")


def test_a_body_that_nobody_reads_is_not_received_without_end(hasty: Served) -> None:
    """The route has no body, and has answered long since."""
    with hasty.raw() as connection:
        connection.sendall(GET + b"content-length: 1000000000\r\n\r\n")
        drip(connection, b"x" * 100)


def test_a_client_that_does_not_read_is_left(hasty: Served) -> None:
    request = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, _, port = hasty.url.removeprefix("http://").partition(":")
        connection.connect((host, int(port)))
        connection.settimeout(0.1)
        with contextlib.suppress(TimeoutError, ConnectionError):
            while True:
                connection.sendall(request * 100)
        wait_for(lambda: not hasty.server.server_state.connections)
    wait_for(lambda: not hasty.server.server_state.tasks)
    still_serves(hasty)


def test_idle_connections_do_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what may be open at a time the one that has been idle for longest is closed, never one
    with a request.
    """
    monkeypatch.setattr(http_server, "raise_connection_limit", lambda: 20)
    with served(Numbers(), Limits(timeout=30.0)) as server:
        with contextlib.ExitStack() as stack:
            slow = stack.enter_context(server.raw())
            slow.sendall(GOOD[:-1])
            wait_for(lambda: server.service.bodies.num_bytes == len(BODY) - 1)
            idle = [stack.enter_context(server.raw()) for _ in range(60)]
            still_serves(server)
            assert len(server.server.server_state.connections) <= 20
            slow.sendall(GOOD[-1:])
            assert status(slow.recv(1000)) == 200
            assert idle[0].recv(1) == b"" if not _is_reset(idle[0]) else True
        still_serves(server)


def _is_reset(connection: socket.socket) -> bool:
    try:
        connection.recv(1, socket.MSG_PEEK)
    except ConnectionError:
        return True
    return False


# Whose name the server answers to


@pytest.mark.parametrize(
    ("header", "is_allowed"),
    [
        ("localhost", True),
        ("localhost:5000", True),
        ("LocalHost.", True),
        ("app.localhost:80", True),
        ("127.0.0.1:5000", True),
        ("10.1.2.3", True),
        ("[::1]:5000", True),
        ("[2001:db8::1]", True),
        ("judge:5000", True),
        ("judge.example", True),
        ("evil.example", False),
        ("evil.example:5000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("evil.example#localhost", False),
        ("localhost@evil.example", False),
        ("judge.evil.example", False),
        ("", False),
        ("localhost:evil", False),
        ("[evil]", False),
        ("::1", False),
        ("127.0.0.1:5000:1", False),
        ("localhost, evil", False),
    ],
)
def test_names_of_the_server(header: str, is_allowed: bool) -> None:
    assert is_allowed_host(header, host_names("judge", ["Judge.Example"])) == is_allowed
    assert is_allowed_host(header, host_names("", ["*"]))


def test_the_name_of_the_machine_is_one_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Node-7")
    assert is_allowed_host("node-7:5000", host_names("0.0.0.0"))
    assert not is_allowed_host("node-8:5000", host_names("0.0.0.0"))


def test_requests_to_other_names_are_refused(plain: Served) -> None:
    """As a page does whose name was made to point to this machine."""
    query = len(plain.reward.calls)
    for path in ("/get_reward", "/health", "/ready", "/metrics", "/openapi.json", "/other"):
        reply = exchange(
            plain,
            GOOD.replace(b"localhost", b"evil.example").replace(b"/get_reward", path.encode()),
        )
        assert status(reply) == 421
        assert "--allowed-host" in json.loads(reply.partition(b"\r\n\r\n")[2])["error"]
    assert len(plain.reward.calls) == query
    two = GOOD.replace(b"host: localhost\r\n", b"host: localhost\r\nhost: evil.example\r\n")
    assert status(exchange(plain, two)) in (400, 421)
    assert status(exchange(plain, GOOD.replace(b"host: localhost\r\n", b""))) == 400
    assert status(exchange(plain, b"GET /health HTTP/1.0\r\n\r\n")) == 200  # as load balancers ask
    with served(Numbers(), web={"allowed_hosts": ["judge.example"]}) as server:
        for name, expected in ((b"judge.example:80", 200), (b"evil.example", 421)):
            request = GET.replace(b"localhost", name) + b"connection: close\r\n\r\n"
            assert status(exchange(server, request)) == expected


# What is no HTTP


def test_malformed_requests_end_nothing(hasty: Served) -> None:
    draw = random.Random(0)
    for _ in range(150):
        request = bytearray(GOOD)
        for _ in range(draw.randrange(1, 6)):
            place = draw.randrange(len(request))
            match draw.randrange(4):
                case 0:
                    request[place] = draw.randrange(256)
                case 1:
                    del request[place : place + draw.randrange(1, 20)]
                case 2:
                    request[place:place] = draw.randbytes(draw.randrange(1, 20))
                case _:
                    request[place:place] = request[draw.randrange(len(request)) :][:20]
        with hasty.raw() as connection, contextlib.suppress(ConnectionError):
            connection.sendall(bytes(request))
            connection.shutdown(socket.SHUT_WR)
            reply = connection.recv(65536)
            assert status(reply) in (0, 200, 400, 404, 405, 408, 413, 415, 421, 422, 431, 501), (
                request,
                reply,
            )
    wait_for(lambda: not hasty.server.server_state.tasks)
    assert 500 not in hasty.statuses
    still_serves(hasty)


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: -1\r\n",
        b"content-length: 1\r\ncontent-length: 2\r\n",
        b"content-length: 1e3\r\n",
        b"transfer-encoding: gzip\r\n",
        b"content-length: 99999999999999999999999\r\ncontent-length: 1\r\n",
        b"x y: z\r\n",
        b"\0: z\r\n",
        b"x: \0\r\n",
    ],
)
def test_contradictory_heads_are_refused(plain: Served, head: bytes) -> None:
    assert status(exchange(plain, POST + head + b"\r\n" + BODY)) in (400, 501)
    still_serves(plain)


def test_smuggled_requests_are_not_answered(plain: Served) -> None:
    """Two lengths that contradict each other: what is behind the body is no request."""
    request = len(plain.reward.calls)
    exchange(
        plain, POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + GOOD
    )
    assert len(plain.reward.calls) == request
    assert http_get(f"{plain.url}/health").status_code == 200
