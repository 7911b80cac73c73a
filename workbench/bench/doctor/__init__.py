"""`python -m workbench doctor`: what a computer has, which code runs on it, what is set wrongly, how fast it is."""

from workbench.bench.doctor.doctor import doctor

__all__ = ["doctor"]
