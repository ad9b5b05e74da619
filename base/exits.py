"""Exit statuses of the run and of all commands.

Rule, for the run and for every other command: 0 = done, and what was checked is right; 93 =
refused, because it cannot be done as asked; 1 = broken off, or something wrong was found (damage, a
difference); 130 = Ctrl-C. A run has two more. `make` turns every failure into its own 2.
"""

FINISHED = 0  # or stopped on request
FAILED = 1  # any status not named here asks for another start of the same command
REQUEUE = 75  # preempted, state saved: start it again when there is room (EX_TEMPFAIL)
REWOUND = 76  # the health policy took the run back: start it again at once
INTERRUPTED = 130  # Ctrl-C, or SIGINT to any rank; what there was to save is saved
DO_NOT_RETRY = 93  # refused, or stopped for good: another start would end alike
