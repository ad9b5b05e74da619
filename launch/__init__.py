"""OUTSIDE the training processes: starts them, watches them, starts them again. Imports no torch.

budget.py                  Whether a run is started again after an attempt, and when: pure functio
setup.py                   Makes the virtual environment, or checks the interpreter that the u
slurm.py                   What a SLURM job does with the wish to be put back in the queue
supervise.py               Keeps a run alive: one attempt after the other, until it ends by itsel
"""
