"""Teams of threads, the counters by which they take tasks, and the division of sequences into runs of tokens."""
