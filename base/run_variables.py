"""Environment variables through which the launcher speaks to the ranks that it starts.

A name stands here once; whoever sets or reads the variable takes it from here.
"""

LAUNCH = "PRETRAIN_LAUNCH"  # number of the supervisor's start to which a rank belongs
FAMILY = (
    "PRETRAIN_FAMILY"  # the supervisor that started a process; a later start takes over from it
)
PLAN = "PRETRAIN_PLAN"  # what the plan chose and predicts, as JSON
BEATS = "PRETRAIN_BEATS"  # folder in which the ranks of one host leave their heartbeats
