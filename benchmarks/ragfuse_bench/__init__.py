"""Measurements: how much faster, how close. Each file is one benchmark."""
