"""LoadPlan in, layers out: KV where it is needed, when it is needed."""
