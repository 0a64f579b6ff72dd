"""The HTTP server with OpenAI's API: one process, one model, and an engine per tenant."""
