"""`ragfuse bench modules` and Prompt Cache's figures: what modules whose KV is kept are worth."""
