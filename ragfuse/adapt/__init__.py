"""What `ragfuse adapt` needs: questions by rule, a teacher, blockwise training of a LoRA adapter, its outcome."""
