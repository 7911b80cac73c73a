"""What every test shares."""

from hypothesis import settings

# A deadline asserts a time, and on a shared computer an example may take any.
settings.register_profile("workbench", deadline=None)
settings.load_profile("workbench")
