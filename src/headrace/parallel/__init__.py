"""Several ranks, one engine: KV-Runahead, context parallelism and tensor parallelism as schedules of one attention."""
