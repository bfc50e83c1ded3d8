"""What a process does for itself: being stopped, forking workers, saying what takes long."""
