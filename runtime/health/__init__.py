"""The verdict on a step, and what follows from it.

health_monitor.py          The health of a run on one rank, from step to step: what the loop a
recovery.py                What follows a verdict that ends an attempt: the run is taken back to a
verdict.py                 Whether training is well: one step's loss and gradient norm against
"""
