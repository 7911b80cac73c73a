"""Ground floor: units, errors, records, catalogues and their display, and the result that all readers give.

It knows no model, no machine and no schedule, and imports nothing of the rooms above.
"""
