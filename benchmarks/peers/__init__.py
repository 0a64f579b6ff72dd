"""Time to first token beside what people use today, on one set of weights. See README.md."""
