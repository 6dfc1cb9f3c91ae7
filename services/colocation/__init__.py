"""The Kubernetes operator that puts tenants, batch workloads, on the CPU cores that serving no longer needs."""
