"""Weights that stay outside the fast memory, and layers computed one at a time."""
