"""Join: the last launch of a cascade merges the prefix's parts and each request's own state."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexattn.kernels.paged_decode.join import join_programs, render_join
from flexattn.runtime.build import Launcher, builder
from flexattn.serving.launching import launch_here
from flexattn.serving.plan import DecodePlan

# Launchers that a cascade remembers, one for each number of rows and of keys that may be read.
_REMEMBERED = 256
# What a run passes, by the names that the kernel has for it.
_GIVEN = ("A", "LSE_A", "B", "LSE_B", "OUT", "LSE", "SEQ_LENS", "V_SCALE")


class Join:
    """What follows a run of `prefix`, a plan whose config says combine="launch".

    It reads the parts of the prefix where that run left them, so that no kernel merges them
    before, and adds them up in float32. It compiles when it is built.
    """

    def __init__(self, prefix: DecodePlan) -> None:
        assert prefix.form.prefix and prefix.config.combine == "launch"
        self._prefix = prefix
        kernels = prefix._kernels
        self.source = render_join(prefix.form, prefix.config, kernels.target)
        self._kernel = builder().kernel(self.source, kernels.target, kernels.gpu)
        self._launchers: dict[tuple[int, ...], Launcher] = {}

    def __call__(
        self,
        before: tuple[Tensor, Tensor],
        own: tuple[Tensor, Tensor],
        out: Tensor,
        lse: Tensor,
        prefix_len: Tensor,
        v_scale: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Launch on the current stream, behind the prefix's last run; returns (out, lse).

        before: what that run returned, of which units that one program walked whole are there.
        """
        rows = lse.numel() // lse.shape[-1]
        if rows == 0:
            return out, lse
        key = (rows, self._prefix.max_keys, 0 if v_scale is None else min(v_scale.numel() - 1, 1))
        launcher = self._launchers.get(key)
        if launcher is None:
            if len(self._launchers) >= _REMEMBERED:
                self._launchers.clear()
            launcher = self._launchers[key] = self._prepared(*key)
        given = (*before, *own, out, lse, prefix_len, v_scale)  # in the order of _GIVEN
        launch_here(launcher, self._kernel.index, given)
        return out, lse

    def _prepared(self, q_rows: int, max_keys: int, stride_scale: int) -> Launcher:
        """A launcher that holds what shapes decide."""
        prefix = self._prefix
        fixed: dict[str, Any] = {
            "WORKSPACE": prefix._owned["WORKSPACE"],
            "q_rows": q_rows,
            "max_keys": max_keys,
        }
        spare = () if prefix.form.scaled else ("V_SCALE",)
        if prefix.form.scaled:
            fixed["stride_scale"] = stride_scale
        programs = join_programs(prefix.form, prefix.config, q_rows)
        return self._kernel.prepare(programs, fixed, _GIVEN, spare=spare)
