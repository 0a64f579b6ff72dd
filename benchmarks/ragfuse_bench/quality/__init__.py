"""Whether answers stay the same: data sets, methods at equal budget, metrics, and the table of them
all.
"""
