"""Calibration: methods, their distance to full prefill, and the choice of a safe one."""
