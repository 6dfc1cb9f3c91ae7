"""Benchmarks: each prints a table; correctness is asserted in tests/, not here."""
