"""Where the gpu lane computes: on the host, or on an NVIDIA card."""
