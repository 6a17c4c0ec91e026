"""Where the service listens, and the links of its raters."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.errors import raises_error
from tests.serving.kit import Served
from valence.apps.serve.app import log_error
from valence.apps.serve.http_server import host_names, is_allowed_host, open_socket
from valence.apps.serve.run import links_of


def test_small_parts_of_a_response_are_sent_at_once() -> None:
    with (
        open_socket("127.0.0.1", 0, has_tokens=True) as place,
        socket.create_connection(place.getsockname()),
        place.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_other_machines_need_a_token() -> None:
    with raises_error("server-token-missing", where="--host", fix="--no-token"):
        open_socket("0.0.0.0", 0, has_tokens=False)
    open_socket("0.0.0.0", 0, has_tokens=True).close()
    open_socket("127.0.0.1", 0, has_tokens=False).close()


def test_each_rater_has_a_link(tmp_path: Path) -> None:
    served = Served(tmp_path)
    links = dict(links_of(served.service, "::1", 80))
    assert links == {
        "anna": "http://[::1]:80/#token=token-of-anna",
        "ben": "http://[::1]:80/#token=token-of-ben",
    }
    served.service.tokens = {}
    assert links_of(served.service, "127.0.0.1", 80) == [("", "http://127.0.0.1:80/")]
    served.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_links_for_other_machines_have_the_name_of_this_one(tmp_path: Path, host: str) -> None:
    served = Served(tmp_path)
    (_, link), *_ = links_of(served.service, host, 80)
    name = link.removeprefix("http://").partition("/")[0]
    assert name == f"{socket.gethostname()}:80"
    assert is_allowed_host(name, host_names(host))
    served.close()


def test_errors_are_printed_with_their_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise RuntimeError("broken \x1b[2J")
    except RuntimeError as error:
        log_error(error)
    shown = capsys.readouterr().err
    assert "test_run.py" in shown
    assert "RuntimeError: broken \N{SYMBOL FOR ESCAPE}[2J" in shown
