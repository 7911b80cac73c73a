"""Units, errors, records, catalogues and their display, and the result that all readers give.

This package knows no model, no machine and no schedule, and imports no other package of the workbench.
"""
