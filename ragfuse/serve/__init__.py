"""The server: OpenAI's HTTP interface over engines, one process, one model."""
