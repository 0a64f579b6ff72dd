"""Calibration: methods, their distance to full prefill, the choice of a safe one."""
