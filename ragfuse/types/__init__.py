"""Values shared by all packages. Nothing here does I/O or makes decisions."""
