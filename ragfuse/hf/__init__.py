"""Everything that needs transformers: encoding, the probe, fused prefill, and `generate`."""
