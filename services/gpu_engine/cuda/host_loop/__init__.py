"""The control loop on a host thread, for comparison with the one on the GPU: the same core, kernels and step graphs."""
