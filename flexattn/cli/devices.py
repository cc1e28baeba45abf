"""`flexattn devices`: the table of devices that can be named without being here."""

from __future__ import annotations

from rich.table import Table

from flexattn.cli import options
from flexattn.cli.terminal import wide_console
from flexattn.device import KNOWN
from flexattn.device.neuroncore import BANK_BYTES, CORES, PSUM_BANKS


def run(args: options.Devices) -> None:
    """Run `flexattn devices`."""
    console = wide_console()
    table = Table()
    table.add_column("device", no_wrap=True)
    table.add_column("arch")
    # 80 columns hold it: a heading of two lines is as wide as the longer one.
    for heading in ("SMs\nor CUs", "shared\nmemory", "registers", "of a\nthread"):
        table.add_column(heading, justify="right", no_wrap=True)
    for device in KNOWN.values():
        numbers = (device.num_sms, device.shared_memory, device.registers, device.max_registers)
        table.add_row(device.name, device.arch, *map(str, numbers))
    console.print(table)
    console.print(_neuron())


def _neuron() -> Table:
    """The limits of one core: memory of a partition, columns of a matmul's moving operand.

    Clocks are those of the Tensor, Vector, Scalar and GpSimd engines.
    """
    table = Table(
        title="AWS Neuron: one core of 128 partitions, cores of a chip", title_justify="left"
    )
    table.add_column("device", no_wrap=True)
    for heading in ("cores", "SBUF KiB", "PSUM KiB", "moving", "T/V/S/G GHz", "DMA GB/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for core in CORES.values():
        clocks = (core.tensor_ghz, core.vector_ghz, core.scalar_ghz, core.gpsimd_ghz)
        table.add_row(
            core.name,
            str(core.cores),
            str(core.sbuf_bytes // 1024),
            f"{PSUM_BANKS} x {BANK_BYTES // 1024}",
            str(core.moving_max),
            "/".join(map(str, clocks)),
            f"{core.dma_engines * core.dma_engine:.0f}",
        )
    return table
