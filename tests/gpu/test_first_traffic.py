"""After warm() and a plan, traffic of random lengths compiles, traces and fills nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 250


def test_the_first_seconds_of_traffic(tmp_path):
    trace = tmp_path / "trace.json"
    own = {"FLEXATTN_CACHE_DIR": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "triton"),
           "FLEXATTN_CHECK": "0"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "bench.first_traffic", "--here", "--seconds=3", "--trace", trace],
        env=dict(os.environ) | own, cwd=ROOT, capture_output=True, text=True, check=False,
        timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print({name: found[name] for name in ("warm_seconds", "kernels", "imported")})
    print(found["slowest"][:3])
    assert (found["compiled"], found["traced"], found["filled"]) == (0, 0, 0)
    assert found["served"].keys() == {"default"} and found["kernels"] > 0
    assert any("flexattn" in event.get("name", "") and event.get("cat") == "kernel"
               for event in json.loads(trace.read_text())["traceEvents"])  # fmt: skip
