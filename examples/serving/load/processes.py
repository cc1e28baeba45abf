"""Child processes of the load test: the server, and clients that are killed."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@contextlib.asynccontextmanager
async def server(options: list[str], seconds: float) -> AsyncIterator[str]:
    """The address of a server in a child process, which ends with the context.

    Raises RuntimeError where it does not listen within so many seconds.
    """
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "examples.serving", "--port", "0", "--with-stdin", *options,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield await asyncio.wait_for(_address(child), seconds)
    finally:
        if child.returncode is None:
            child.terminate()
            try:
                await asyncio.wait_for(child.wait(), 10)
            except asyncio.TimeoutError:
                child.kill()
                await child.wait()


async def _address(child: asyncio.subprocess.Process) -> str:
    assert child.stdout is not None
    while line := (await child.stdout.readline()).decode():
        if "listening on " in line:
            return line.split()[-1]
        print(line, end="")
    raise RuntimeError(f"the server has ended with status {await child.wait()}")


async def killed_client(url: str, posted: dict[str, object], count: int) -> int:
    """Kill a process that is reading so many streams; returns how many."""
    where = urlsplit(url)
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "examples.serving.load.victim", where.hostname or "",
        str(where.port), json.dumps(posted), str(count), stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        try:
            said = await asyncio.wait_for(child.stdout.readline(), 60)
        except asyncio.TimeoutError:
            said = b""
        if said != b"ready\n":
            raise RuntimeError(f"a client that was to be killed said {said!r} within 60 s")
    finally:
        child.kill()
        await child.wait()
    return count
