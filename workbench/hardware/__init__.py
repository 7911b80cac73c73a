"""Machines: devices and links, the catalogue of processors, and the profile that a calibration measured.

Stages are priced by these rates.
"""

from workbench.hardware.machine import Device, Interconnect, Link, Machine, machines, usable_cores, value_names

__all__ = ["Device", "Interconnect", "Link", "Machine", "machines", "usable_cores", "value_names"]
