"""This computer's instruction sets, vectors, matrix registers, and memory in huge pages."""
