"""The ring over RDMA: one-sided verbs on a reliable connection, by pyverbs, which only this package imports."""
