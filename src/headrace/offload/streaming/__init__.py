"""Decoding on KV that stays outside the fast memory (KVPR, arXiv 2411.17089, sections 3.2 to 3.4)."""
