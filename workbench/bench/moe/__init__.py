"""The routed experts of a layer in bf16, on the GPU if there is one, against torch and Liger."""
