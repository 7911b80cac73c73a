"""`python -m workbench measure`, which the first `Machine.local()` of a computer calls."""

import math
import subprocess
import sys

import workbench as wb


def test_a_computer_that_was_never_measured_gets_its_rates(tmp_path):
    record = tmp_path / "here.json"
    command = [sys.executable, "-P", "-m", "workbench", "measure", "--out", str(record)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    here = wb.Machine.load(record)
    assert here.is_local
    rates = [rate for device in (here.gpu, here.cpu) for rate in (device.bandwidth, *dict(device.flops).values())]
    assert all(1e8 < rate < 1e14 for rate in (*rates, here.link.h2d, here.link.d2h))
    assert all(0 < device.overhead < 0.1 for device in (here.gpu, here.cpu))
    assert math.isclose(here.gpu.overhead, here.cpu.overhead)
