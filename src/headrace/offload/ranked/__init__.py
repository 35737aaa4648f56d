"""Tiers of the ranks: each stores and restores the chunks of its own pool, as rank 0 says."""
