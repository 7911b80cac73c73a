"""The search for the settings of the CPU kernels on the computer at hand."""
