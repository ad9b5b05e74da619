"""The ranks of one host: started, watched, ended.

hang_judge.py      decides which rank hangs, once the watchdog hears silence
inquiry.py         finds the rank that hangs, of all hosts
oom.py             counts the processes that the kernel has killed out of memory
outcome.py         combines the ends of all ranks: one exit status, and the first error
rank_process.py    one rank as a process: its variables, output and signals
ranks.py           the ranks of one host, from their start to the end of the last one
recipe_file.py     the composed recipe as a file that the ranks of an attempt read
run_logs.py        log files of ranks in the run's folder
screen.py          shows the output of many ranks to a person
shutdown.py        decides which signal the ranks get when, once they must end
start.py           one attempt of a run, on this host or on many
watchdog.py        detects that a rank is silent, and finds which one hangs
"""
