"""Generation of machine code: Numba's settings and cache, LLVM vectors and matrix registers, and numerics."""
