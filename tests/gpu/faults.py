"""Runners of a real GPU whose configs do what a broken kernel does to it."""

import ctypes
import os
import signal
from contextlib import contextmanager

import torch
import triton
import triton.language as tl

from flexattn.kernels.triton.config import PrefillConfig
from flexattn.measure.runner import DeviceRunner
from flexattn.runtime.launch import Outputs

RUNNER = f"{__name__}:FaultyRunner"
# Never launched as attention: FaultyRunner knows them by their num_warps.
BAD_ADDRESS, SPIN, MEMORY, SCARCE, KILLED, SEGFAULT = (
    PrefillConfig(64, 64, warps, 1) for warps in range(101, 107)
)
SPIN_CHUNKS, SPIN_CYCLES = 20, 2**31 - 1  # each about a second of an H200's clock


@contextmanager
def little_memory(more=2**26):
    """The allocator's own limit: what it holds now, and so many bytes more."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@triton.jit
def write_at(address):
    tl.store(address.to(tl.pointer_type(tl.int32)), 1)


class FaultyRunner(DeviceRunner):
    def _call(self, config):
        fault = {
            101: self.write_far_away, 102: self.spin, 103: self.ask_for_too_much,
            104: self.ask_for_more_than_allowed, 105: self.be_killed, 106: self.read_nothing,
        }  # fmt: skip
        return fault.get(config.num_warps) or super()._call(config)

    def write_far_away(self):
        write_at[(1,)](2**46 + 64)

    def spin(self):
        for _ in range(SPIN_CHUNKS):
            torch.cuda._sleep(SPIN_CYCLES)

    def ask_for_too_much(self):
        torch.empty(2**50, dtype=torch.int8, device="cuda")

    def ask_for_more_than_allowed(self):
        with little_memory():
            torch.empty(2**30, dtype=torch.int8, device="cuda")

    def be_killed(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def read_nothing(self):
        ctypes.string_at(0)


class ForgetfulRunner(DeviceRunner):
    """Its kernels leave the last rows of the output as they were."""

    def _call(self, config):
        call = super()._call(config)

        def forgetful():
            right = call()
            out = torch.empty_like(right.out)
            out[:, :, :-3] = right.out[:, :, :-3]
            return Outputs(out, right.lse, right.max_scores)

        return forgetful
