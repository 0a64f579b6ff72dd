"""The release check (`make dist`): the distributions built, and used from an environment that has
nothing else.

Nothing here uploads anything.
"""
