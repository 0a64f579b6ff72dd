"""`ragfuse bench ray`: the router of replicas, simulated at size."""
