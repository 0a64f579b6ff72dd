"""Load cached KV according to a `LoadPlan`, layer by layer, ahead of the prefill."""
