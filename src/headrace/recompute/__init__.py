"""KV that outlives its memory: what to load and what to recompute (KVPR, arXiv 2411.17089), and doing both at once."""
