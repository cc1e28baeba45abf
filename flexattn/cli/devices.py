"""`flexattn devices`: the table of devices that can be named without being here."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from flexattn.device import KNOWN


def devices() -> None:
    """List the devices that `render --device` takes."""
    table = Table()
    table.add_column("device", no_wrap=True)
    table.add_column("arch")
    for heading in ("SMs or CUs", "shared memory", "registers", "a thread's"):
        table.add_column(heading, justify="right")
    for device in KNOWN.values():
        numbers = (device.num_sms, device.shared_memory, device.registers, device.max_registers)
        table.add_row(device.name, device.arch, *map(str, numbers))
    Console().print(table)
