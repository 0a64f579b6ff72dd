"""The server: OpenAI's HTTP interface over engines, one process, one model.

Only what is asked for over HTTP lives here; how an answer is made is the engine's.
"""
