"""One rank as a process: its place among the others, and how they find each other.

link_test.py               the doctor's collective test: a known sum, and the speed of every link
process.py                 rank, device and process group of this process; start and end of a rank
rendezvous.py              rendezvous: the ranks find rank 0's key-value store through a known port
visible_gpus.py            the GPUs that this host shows, found without torch
"""
