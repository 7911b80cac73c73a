"""The device on which the gpu lane computes: the host, or an NVIDIA card."""
