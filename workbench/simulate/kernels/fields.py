"""Places of numbers in the arrays of counts and of reals that the kernels of iterations share with Python."""

RUNNING, FRONT, PREEMPTED, FIRST_NEW, NEW, DECODED, FREE, PREEMPTIONS, RECOMPUTED, FINISHED = range(10)
"""Counts of a queue: its lists' lengths and beginnings, and the numbers of the same names in `PagedQueue`."""
ADMITTED, DECODING, OPEN, BASE = range(10, 14)
"""Counts of the iteration under way: requests just admitted, which stand last among the running, sequences that decode,
1 while its batch is not executed, and the place of the oldest running sequence."""
NUMBER, BEGUN, DONE, LIMIT, LATEST = range(14, 19)
"""Counts of the record: number of the iteration, runs of tokens begun, iterations done, and iterations allowed; and the
iteration in which all running sequences got their latest token, if `_Tokens.latest` is not written yet, else -1."""
BLOCK, TOTAL, PREFILLS_FIRST, MOST_RUNNING = range(19, 23)
"""Fixed counts: tokens of a block, blocks, 1 for the queue of `ContinuousBatching`, and most running sequences."""
COUNTS = 23
DUE, NOW, CARRIED, BUDGET, PACE, SHORTEST, NEXT_ARRIVAL, CONTEXT, READ = range(9)
"""Reals: of a queue what its pace lets come and the time; seconds that the link still moves; token budget, pace and
shortest prompt; time of the next arrival; KV entries read so far; and bytes of experts where no tape gives them."""
REALS = 9
