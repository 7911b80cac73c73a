"""This computer's instruction sets and vector widths, and memory in huge pages."""
