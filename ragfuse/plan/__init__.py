"""Pure decisions: no torch, no clock, no I/O."""
