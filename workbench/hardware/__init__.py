"""Machines: devices and links, the catalogue of processors, and the profile that a calibration measured.

Stages are priced by these rates.
"""

from workbench.hardware.free_memory import FreeMemory, free_memory
from workbench.hardware.machine import Device, Interconnect, Link, Machine, machines, usable_cores, value_names

__all__ = [
    "Device",
    "FreeMemory",
    "Interconnect",
    "Link",
    "Machine",
    "free_memory",
    "machines",
    "usable_cores",
    "value_names",
]
