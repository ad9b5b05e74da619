"""Hosts: which ones a run uses, what they are like, how something is started there.

agent.py          runs on every host: carries out one order of the launcher and reports
carriers.py       starts agents on hosts: by ssh, pdsh or srun, or as a child process
cluster.py        agents on many hosts as one thing: orders, messages, stop
facts.py          gathers the facts of one host that the doctor compares
fleet.py          the hosts of a run between its attempts: which ones train, wait or take over
hostfile.py       reads hostfiles, include and exclude lists, and SLURM's node lists
judge.py          judges a set of hosts by the facts of each
link_speeds.py    finds slow links between hosts
network.py        addresses, interfaces and ports of this host
own_gpus.py       the number of ranks where nobody gave one: the GPUs of this machine
place.py          the place where a run starts: this machine, a hostfile, or a SLURM job
preflight.py      examines the hosts before the first step, and finds the routes between them
spares.py         examines spare hosts beside the run
variables.py      chooses the variables that reach the ranks on other hosts
"""
