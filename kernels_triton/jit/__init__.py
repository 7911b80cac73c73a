"""What triton compiles or interprets. Its modules import triton, so wrappers import them when called."""
