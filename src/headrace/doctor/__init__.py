"""Findings about this machine: what `headrace doctor` shows."""
