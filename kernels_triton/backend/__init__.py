"""The choice of an implementation, the import of triton, operators of torch, and checks of operands.

`mode` and the modules `jit_*` of the other folders import triton, so wrappers import them only when called.
"""
