"""Load cached KV as a `LoadPlan` says: layer by layer, ahead of the prefill that uses it."""
