"""The control loop: the scheduling core as one thread block that never leaves the GPU."""
