"""The server: OpenAI's HTTP interface over engines, one process, one model.

`schema` what may be sent · `wishes` a request as a question and an `Ask` · `replies` an answer as OpenAI writes it ·
`logprobs` how likely its tokens were · `run` answers written in the background · `turnstile` who is next · `keys` who
may ask, and as which tenant · `guard` what is looked at before a request is read · `refusals` errors as OpenAI writes
them · `service` what all routes share · `routes`, `stats`, `app` the routes · `wire`, `server` the process's side.

Only what is asked for over HTTP lives here; what an answer is made of is told in the engine.
"""
