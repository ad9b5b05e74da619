"""This process among the others.

link_test.py               The doctor's collective test, started as the ranks of a run are: `p
process.py                 This process among the others: its rank, its device, the process gr
rendezvous.py              How the ranks of a run find each other: a greeting at a known port
"""
