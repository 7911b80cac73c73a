"""Threads side by side, the counters by which they take tasks, and the runs of tokens that tasks are cut into."""
