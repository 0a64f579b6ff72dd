"""Measurements: how much sooner, how close. `runner` is what all share; each other file is one benchmark."""
