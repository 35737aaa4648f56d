"""What a prefill costs on several ranks, and which schedule and partition to use, from measured numbers alone."""
