"""Questions that come to a server as they like (CacheBlend, figure 14): `asked` what they are,
`load` when they come and what is heard, `served` the server in a process of its own, `run` the
measurement, `report` how it is told.
"""
