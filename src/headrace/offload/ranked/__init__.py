"""Tiers of several ranks: each rank stores and restores the chunks of its own pool, as rank 0 says."""
