"""Hostile clients, as a program of their own: `python crowd.py PORT idle=2000 dribbling=200 unread=50 leaving=20`.

Each comes again when it is closed. It says so on its output when all have come once. Imports nothing of the package.
"""

import asyncio
import contextlib
import json
import random
import resource
import sys

LONG = json.dumps({"prompt": "word " * 20_000}).encode()
STREAM = json.dumps({"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}).encode()


def request(path: str, body: bytes) -> bytes:
    head = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


async def hostile(port: int, kind: str, come: asyncio.Semaphore) -> None:
    """A client that says nothing, dribbles headers, does not read, or goes away in the middle of its answer."""
    first = True
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
            if first:
                come.release()
                first = False
            if kind in ("unread", "leaving"):
                writer.write(request("/v1/tokenize", LONG) if kind == "unread" else request("/v1/completions", STREAM))
            if kind == "dribbling":
                while not reader.at_eof():
                    writer.write(b"X: y\r\n")
                    await asyncio.sleep(2)
            elif kind == "idle":
                await reader.read(1)  # until it is closed
            else:
                await asyncio.sleep(60 if kind == "unread" else 0.05)
            writer.transport.abort()
        await asyncio.sleep(random.uniform(2, 8))


async def main() -> None:
    come = asyncio.Semaphore(0)
    wanted = {kind: int(count) for kind, _, count in (argument.partition("=") for argument in sys.argv[2:])}
    crowd = [hostile(int(sys.argv[1]), kind, come) for kind, count in wanted.items() for _ in range(count)]
    together = asyncio.gather(*crowd)
    for _ in crowd:
        await come.acquire()
    print("all here", flush=True)
    await together


if __name__ == "__main__":
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    asyncio.run(main())
