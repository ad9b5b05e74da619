"""How the Python entry ends: what an exit status asks of whoever started it.

Facts about exit statuses that callers rely on; `make` turns every failure into its own 2.
"""

FINISHED = 0  # or stopped on request
FAILED = 1  # any status not named here asks for another start of the same command
REQUEUE = 75  # preempted, state saved: start it again when there is room (EX_TEMPFAIL)
REWOUND = 76  # the health policy took the run back: start it again at once
DO_NOT_RETRY = 93  # refused, or stopped for good: another start would end alike
