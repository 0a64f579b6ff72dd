"""Code that runs a transformers model: encoding, probing, fused prefill and generation."""
