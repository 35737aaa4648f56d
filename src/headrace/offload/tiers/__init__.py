"""Below the pool: host memory, disk and a remote store, behind one interface (base.Tier)."""
