"""Runners of a real GPU whose configs do what a broken kernel does to it."""

import torch
import triton
import triton.language as tl

from flexattn.kernels.triton.config import PrefillConfig
from flexattn.measure.runner import DeviceRunner
from flexattn.runtime.launch import Outputs

RUNNER = f"{__name__}:FaultyRunner"
# Never launched as attention: FaultyRunner knows them by their num_warps.
BAD_ADDRESS, SPIN, MEMORY = (PrefillConfig(64, 64, warps, 1) for warps in (101, 102, 103))
SPIN_CHUNKS, SPIN_CYCLES = 20, 2**31 - 1  # each about a second of an H200's clock


@triton.jit
def write_at(address):
    tl.store(address.to(tl.pointer_type(tl.int32)), 1)


class FaultyRunner(DeviceRunner):
    def _call(self, config):
        fault = {101: self.write_far_away, 102: self.spin, 103: self.ask_for_too_much}
        return fault.get(config.num_warps) or super()._call(config)

    def write_far_away(self):
        write_at[(1,)](2**46 + 64)

    def spin(self):
        for _ in range(SPIN_CHUNKS):
            torch.cuda._sleep(SPIN_CYCLES)

    def ask_for_too_much(self):
        torch.empty(2**50, dtype=torch.int8, device="cuda")


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
