"""The cuda engine: kernels, their compiler, weights on the device and the step executor.

Needs the extra ``blink[cuda]``. Nothing outside this package imports it before a CUDA engine is asked for.
"""
