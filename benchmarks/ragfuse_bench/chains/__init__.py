"""The programs that `ragfuse bench dropin` runs, twice each: as people write them today, and with
the model swapped.

Whole and plain, so that comparing their source says what a swap takes; nothing is measured here.
"""
