"""`ragfuse bench ray`: bulk encoding and serving on a local Ray cluster, and the router simulated at size."""
