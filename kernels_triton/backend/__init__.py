"""Which implementation computes, how triton is entered, operators of torch, and the checks that all operands pass.

`mode` and the modules `jit_*` of the other folders import triton, so wrappers import them when called.
"""
