"""What belongs to one process: locks that survive a fork, and objects that all its engines share."""
