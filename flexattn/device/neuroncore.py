"""NeuronCore: the limits of AWS's chips that NKI kernels are bound by, as documented.

Sources, all in the AWS Neuron documentation as of SDK 2.32:
[arch2] nki/guides/architecture/trainium_inferentia2_arch, [arch3] …/trainium2_arch,
[arch4] …/trainium3_arch, [isa] nki/api/nki.isa.
"""

from __future__ import annotations

from dataclasses import dataclass

# The same on every generation [arch2, arch3, arch4].
PARTITIONS = 128
PSUM_BANKS = 8
KIB = 1024
BANK_BYTES = 2048
STATIONARY_MAX = 128


@dataclass(frozen=True, slots=True)
class NeuronCore:
    """One core: what fits, and what it can do.

    generation: 2 for NeuronCore-v2. sbuf_bytes: of one partition. moving_max: columns of a
    matmul's moving operand into an fp32 result. cores: of one chip.
    """

    name: str
    generation: int
    cores: int
    sbuf_bytes: int
    moving_max: int

    @property
    def physical_cores(self) -> int:
        """Physical cores of a logical one, unless a user says otherwise [lnc]."""
        return 2 if self.generation >= 3 else 1

    @property
    def has_range_select(self) -> bool:
        """nisa.range_select, from NeuronCore-v3 [isa]."""
        return self.generation >= 3

    @property
    def has_exact_transpose(self) -> bool:
        """A Tensor Engine transpose that NaN in one row leaves the others alone, from v3 [isa]."""
        return self.generation >= 3

    @property
    def has_bf16_psum(self) -> bool:
        """A matmul that writes bfloat16, and across PSUM banks, from v4 [isa, arch4]."""
        return self.generation >= 4


CORES: dict[str, NeuronCore] = {
    core.name: core
    for core in (
        # SBUF: [arch2], [arch3], [arch4]; moving_max: [isa] nc_matmul.
        NeuronCore("trn1", 2, 2, 192 * KIB, 512),
        NeuronCore("trn2", 3, 8, 224 * KIB, 512),
        NeuronCore("trn3", 4, 8, 256 * KIB, 4096),
    )
}
