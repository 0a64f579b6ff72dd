"""Training of chunk adapters: examples from documents, a teacher, and a LoRA adapter."""
