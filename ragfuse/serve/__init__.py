"""The server: OpenAI's HTTP interface over engines, in one process with one model."""
