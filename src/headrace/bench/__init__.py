"""Benchmarks: what is measured, on which testbed, how results are written. cli.bench runs them."""
