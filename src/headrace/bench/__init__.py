"""Benchmarks (registry.py lists them), the testbeds they measure on, `headrace tune` and the demo. No command line."""
