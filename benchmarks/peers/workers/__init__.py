"""Programs that answer prompts for the comparison, each run by the Python of the engine that it
drives.
"""
