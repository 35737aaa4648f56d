"""Stored chunks on their way back into the pool: what to load, project or recompute (KVPR, arXiv 2411.17089)."""
