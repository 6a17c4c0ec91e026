"""A client for many concurrent connections."""

from __future__ import annotations

import asyncio


class Connection:
    """A persistent HTTP connection.

    (httpx needs as long for a request, with this concurrency, as the server for ten.)
    """

    def __init__(self, url: str) -> None:
        self.host, _, self.port = url.removeprefix("http://").partition("/")[0].partition(":")
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the reply.

        Raises OSError or IncompleteReadError when the connection breaks.
        """
        try:
            if self.streams is None:
                self.streams = await asyncio.open_connection(self.host, int(self.port))
            reader, writer = self.streams
            head = (
                f"POST /get_reward HTTP/1.1\r\nhost: {self.host}\r\ncontent-type: "
                f"application/json\r\n"
            )
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            headers = {
                name.lower(): value.strip()
                for name, _, value in (line.partition(":") for line in lines)
            }
            reply = await reader.readexactly(int(headers["content-length"]))
        except (OSError, asyncio.IncompleteReadError):
            self.streams = None
            raise
        if headers.get("connection") == "close":
            self.streams = None
        return int(first.split()[1]), headers, reply
