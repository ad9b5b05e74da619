"""Starts the training processes, watches them, and starts them again. Imports no torch.

budget.py       decides whether a run is started again after an attempt, and when
setup.py        makes the virtual environment, or checks the interpreter that the user chose
slurm.py        puts a SLURM job back in the queue where its run asks for it
supervise.py    keeps a run alive: one attempt after the other
trial.py        halves a micro-batch that the plan chose and whose first step does not fit
"""
