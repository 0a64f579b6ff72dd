"""The training of `ragfuse adapt`: examples and questions made of documents, a teacher, a LoRA
adapter.
"""
