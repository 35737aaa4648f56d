"""Trains the tiny model in src/headrace/assets/tiny. Start at train.py."""
