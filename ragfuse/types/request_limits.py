"""What one request may bring, wherever it is written or read: by the engine, a server or its
client.
"""

MAX_TITLE_CHARS = 256
"""Most characters of a document's title, which is stored with its chunk."""
MAX_RETRIEVED = 256
"""Most documents of one question that are searched for in it; retrievers give the best first."""
OVERLONG = "context_length_exceeded"
"""The code of the error about a prompt that is too long, as at OpenAI: clients know it by this."""
