"""Calibration: measure how far reuse is from full prefill, and choose a safe policy and ratio."""
