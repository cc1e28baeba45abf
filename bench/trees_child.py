"""One checkout's side of `bench.trees`: prepares a row and times it when it is told.

Run with that checkout's root in PYTHONPATH, by the path of this file, so that one protocol serves
old checkouts too. A line of JSON comes in, a line goes out: `{"bench", "row"}` prepares and
answers with the gate; `{"calls"}` answers microseconds per call.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import sys
import time
from typing import Any

import torch

from bench.host import ROWS as HOST_ROWS
from bench.inputs import make
from bench.oracle import judge_slices
from bench.peers import OURS, ours
from bench.rows import decode_rows, mods_rows, prefill_rows
from bench.serving_inputs import judge_requests, make_served
from bench.serving_peers import SERVING_PEERS
from bench.serving_rows import serving_rows
from flexattn.measure.clock import CudaClock

# Of one request, which may compile for minutes.
SECONDS = 600
ROWS = {
    "prefill": prefill_rows, "mods": mods_rows, "decode": decode_rows, "serving": serving_rows,
    "host": lambda: HOST_ROWS,
}  # fmt: skip


class Side:
    """The row that is prepared now, and its clock."""

    def __init__(self) -> None:
        self.call: Any = None
        self.clock: Any = None

    def prepare(self, bench: str, row: str) -> dict[str, Any]:
        """Build the row's call, check what it computes, warm it up."""
        self.call = self.clock = None
        gc.collect()
        torch.cuda.empty_cache()
        found = next(each for each in ROWS[bench]() if each.name == row)
        if bench == "serving":
            served = make_served(found)
            call = SERVING_PEERS[OURS](served)
            verdict = judge_requests(call(), served)
        else:
            inputs = make(found, "cuda", torch.bfloat16)
            call = ours(inputs)
            verdict = judge_slices(call(), inputs)
        alone = bench in ("decode", "serving")
        self.clock = Host() if bench == "host" else CudaClock(flush_l2=alone, graph=alone)
        self.clock.warm()
        self.call = self.clock.prepare(call)
        self.clock.sample(self.call, 3)
        return {"passed": verdict.passed, "message": verdict.message()}

    def sample(self, calls: int) -> dict[str, Any]:
        """Mean microseconds of a call."""
        self.clock.warm()
        return {"us": self.clock.sample(self.call, calls)}


class Host:
    """The host's part of a call: bursts that never wait for the GPU."""

    def warm(self) -> None:
        """Nothing: the host's clock needs none."""

    def prepare(self, call: Any) -> Any:
        """The call itself."""
        return call

    def sample(self, call: Any, calls: int) -> float:
        """Mean microseconds of the host in a burst of calls."""
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        for _ in range(calls):
            call()
        return (time.perf_counter_ns() - begin) / calls / 1e3


def main() -> None:
    """Answer lines until the input ends."""
    side = Side()
    answers, sys.stdout = sys.stdout, sys.stderr
    with torch.no_grad():
        for line in sys.stdin:
            asked = json.loads(line)
            # As bench.time_limit, which old checkouts lack: the parent sees that this one ended.
            faulthandler.dump_traceback_later(SECONDS, exit=True, file=sys.__stderr__)
            try:
                found = side.sample(**asked) if "calls" in asked else side.prepare(**asked)
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"[:500]}
            faulthandler.cancel_dump_traceback_later()
            print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
