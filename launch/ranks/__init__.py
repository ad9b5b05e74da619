"""The ranks of one host: started, watched, ended.

inquiry.py                 Which rank of all hosts hangs, once one host hears silence
oom.py                     How many processes the kernel has killed out of memory: it say
outcome.py                 What the ends of all ranks add up to: one exit status, and the erro
ranks.py                   The ranks of one host: started, watched, stopped, their output kept
screen.py                  What a person sees of many ranks: rank 0 as it speaks, and of a fai
start.py                   Starts the ranks of a run and stays until none lives: on this host,
watchdog.py                Hears when a rank of this host falls silent, finds out which one ha
"""
