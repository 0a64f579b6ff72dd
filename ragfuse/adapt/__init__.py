"""Training of chunk adapters: examples from documents, a teacher, a LoRA adapter."""
