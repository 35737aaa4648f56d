"""KV and weights outside the pool: tiers that keep them, restoring into the pool, decoding that streams, weights."""
