"""Writes the screens of docs/tour.md anew: `python -m tools.tour.write [NAME ...]`."""
