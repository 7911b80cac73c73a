"""What this computer offers: instruction sets, vectors, matrix registers, and memory in huge pages."""
