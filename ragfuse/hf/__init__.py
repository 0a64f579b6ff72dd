"""Everything on transformers: encoding, the probe, fused prefill, and `generate`."""
