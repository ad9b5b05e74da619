"""Hosts: which, what they are like, how to start something there.

agent.py                   On every host of a run: `python -m launch.hosts.agent`, which does
carriers.py                How agents get onto hosts: ssh, pdsh, SLURM's srun, or simply a chi
cluster.py                 Agents on many hosts as one thing: give them an order, hear what th
facts.py                   What one host is like: the facts that the doctor compares
fleet.py                   The hosts of a run between its attempts: who trains, who waits, who is
hostfile.py                Which hosts a run gets: DeepSpeed's hostfile, its include and exclu
judge.py                   What is wrong with a set of hosts, from the facts of each: pure fun
link_speeds.py             Which link between hosts is slow, or which host all slow links shar
network.py                 Addresses, interfaces and ports of this host
place.py                   Where a run is to start, from the command line and the environment:
preflight.py               Before step 0 of a run on several hosts: facts, judgement, and the
spares.py                  Hosts that wait: looked at now and then beside the run, and told of
variables.py               Which variables of the caller reach the ranks on other hosts
"""
