"""The ring: the memory region that gateways and an engine share. schema.py is its layout, docs/ring.md explains it."""
