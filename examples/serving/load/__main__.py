"""`python -m examples.serving.load`: thousands of requests, and exit 1 with words if one is wrong.

It starts a server in a child process, with the options of `python -m examples.serving`, or takes
one at --url. Clients send requests of random lengths; some go away, are cancelled, have too little
time, are too long or refused, and a client process is killed. At the end every page must be free,
every answer that of its prompt, and memory flat within 1 % after the first thousand.
"""

import argparse
import asyncio
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from examples.serving.load.figures import save, table
from examples.serving.load.processes import LOOPBACK, server
from examples.serving.load.run import Plan, Run, options_at


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.serving.load", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        epilog="Other options are the server's: python -m examples.serving --help",
    )  # fmt: skip
    some = Plan(10_000)
    add = parser.add_argument
    add("--requests", type=int, default=some.requests, help="beside a burst that fills the queue")
    add("--clients", type=int, default=some.clients, help="requests at a time")
    add("--distinct", type=int, default=some.distinct, help="different prompts")
    add("--prompt", type=int, default=some.prompt, help="tokens of the longest prompt")
    add("--answer", type=int, default=some.answer, help="tokens of the longest answer")
    add("--one-by-one", type=int, default=some.one_by_one, help="prompts that are asked alone")
    add("--judged", type=int, default=some.judged, help="answers held to float64")
    add("--killed", type=int, default=some.killed, help="client processes that are killed")
    add("--seconds", type=float, default=900.0, help="after which the run has failed")
    add("--url", default="", help="of a server on this machine that runs already")
    add("--json", type=Path, metavar="FILE", help="where the figures go")
    return parser


async def _at(url: str, plan: Plan) -> tuple[Run, dict[str, Any]]:
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        run = Run(session, url, plan, await options_at(session, url))
        return run, await run.go()


async def _run(url: str, options: list[str], plan: Plan) -> tuple[Run, dict[str, Any]]:
    if url:
        return await _at(url.rstrip("/"), plan)
    async with server(options, seconds=300.0) as started:
        return await _at(started, plan)


def main(argv: list[str] | None = None) -> int:
    """Run, print the figures, and say what is wrong."""
    parser = _parser()
    args, options = parser.parse_known_args(argv)
    if args.url and options:
        parser.error(f"the server at --url has its options already: {' '.join(options)}")
    if args.url and urlsplit(args.url).hostname not in LOOPBACK:
        print(f"--url {args.url}: the load test asks servers on this machine alone: {LOOPBACK}")
        return 2
    plan = Plan(
        args.requests, args.clients, args.distinct, args.prompt, args.answer, args.one_by_one,
        args.judged, args.killed,
    )  # fmt: skip
    try:
        run, row = asyncio.run(asyncio.wait_for(_run(args.url, options, plan), args.seconds))
    except (RuntimeError, aiohttp.ClientError) as error:
        print(f"the run was cut short: {error}", file=sys.stderr)
        return 1
    except asyncio.TimeoutError:
        print(f"the run has not ended after {args.seconds:.0f} s", file=sys.stderr)
        return 1
    print(table(row))
    if args.json:
        save(args.json, {**asdict(plan), "server": asdict(run.options)}, row)
    for words, count in Counter(run.wrong).most_common(20):
        print(f"WRONG: {words}" + f" ({count} times)" * (count > 1), file=sys.stderr)
    print("nothing is wrong" if not run.wrong else f"{len(run.wrong)} things are wrong")
    return int(bool(run.wrong))


if __name__ == "__main__":
    raise SystemExit(main())
