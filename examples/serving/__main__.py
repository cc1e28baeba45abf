"""`python -m examples.serving`: start the server on this machine's loopback."""

import argparse
import asyncio
import gc
import signal
import sys

import torch
from aiohttp import web

from examples.serving.attention import CASCADE_FROM
from examples.serving.build import DTYPES, Options, build
from examples.serving.metrics import Metrics
from examples.serving.model import SHAPES
from examples.serving.request import Limits
from examples.serving.web import Front
from flexattn.errors import FlexAttnError
from flexattn.settings import current

HOST = "127.0.0.1"


def _add_options(parser: argparse.ArgumentParser) -> None:
    """What a server is made of."""
    some, on_gpu = Limits(), torch.cuda.is_available()
    on_plans = on_gpu or current().interpret
    add = parser.add_argument
    add("--model", choices=SHAPES, default="tiny", help="random weights, made on the spot")
    add("--attention", choices=("plan", "torch"), default="plan" if on_plans else "torch",
        help="torch: a stand-in for a machine without a GPU")  # fmt: skip
    add("--dtype", choices=DTYPES, help="bfloat16 on a GPU and with --batch-invariant")
    add(
        "--batch-invariant", action="store_true", help="an answer's bits never depend on the batch"
    )
    add("--cascade-from", type=int, default=CASCADE_FROM, metavar="KEYS",
        help="keys of a shared prefix that a cascade must save a step; 0: none")  # fmt: skip
    add("--batch", type=int, default=some.batch, help="requests in a step")
    add("--chunk", type=int, default=some.chunk, help="rows of prompts in a step")
    add("--longest", type=int, default=some.longest, help="tokens of a request")
    add("--page", type=int, default=some.page, help="tokens of a page")
    add("--pages", type=int, default=some.pages, help="pages of the cache, and one for no request")
    add("--queue", type=int, default=some.queue, help="requests that may wait")


def options_of(args: argparse.Namespace) -> Options:
    """The options that were given, with the defaults of this machine."""
    on_gpu = torch.cuda.is_available()
    usual = "bfloat16" if on_gpu or args.batch_invariant else "float32"
    usual = "float64" if args.attention == "torch" and not on_gpu else usual
    return Options(
        args.model, args.attention, "cuda" if on_gpu else "cpu", args.dtype or usual,
        args.batch_invariant, args.cascade_from,
        Limits(args.batch, args.chunk, args.longest, args.page, args.pages, args.queue),
    )  # fmt: skip


async def listen(front: Front, port: int, with_stdin: bool = False) -> None:
    """Serve until the process is asked to stop; says the address once requests are taken."""
    # Without it a handler would learn only at its next write that its client has gone.
    runner = web.AppRunner(
        front.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0
    )
    await runner.setup()
    site = web.TCPSite(runner, HOST, port, backlog=1024)
    await site.start()
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if with_stdin:
        loop.add_reader(sys.stdin, stop.set)
    print(f"listening on http://{HOST}:{runner.addresses[0][1]}", flush=True)
    await stop.wait()
    await runner.cleanup()


def main(argv: list[str] | None = None) -> int:
    """Build what the options say, then listen."""
    parser = argparse.ArgumentParser(prog="python -m examples.serving", description=__doc__)
    parser.add_argument("--port", type=int, default=8000, help="0 for any that is free")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of a request")
    parser.add_argument(
        "--with-stdin",
        action="store_true",
        help="stop where standard input ends: a parent is gone",
    )
    _add_options(parser)
    args = parser.parse_args(argv)
    options = options_of(args)
    if options.attention == "torch":
        print("attention is plain torch over the same pages: a stand-in, no way to serve")
    metrics = Metrics()
    try:
        engine = build(options, metrics)
    except FlexAttnError as error:
        print(error, file=sys.stderr)
        return 2
    front = Front(engine, metrics, options, args.timeout)
    # Python's collector would stop the server for 0.1 s and more to look at what stays for good.
    gc.collect()
    gc.freeze()
    asyncio.run(listen(front, args.port, args.with_stdin))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
