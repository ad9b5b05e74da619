"""The folder of a run, and what is written in it.

alerts.py                  Tells people what they should know now: an event, a line on the con
attempts.py                The attempts of a run in events.jsonl: each start of all ranks leaves
bundle.py                  What a person needs when a run has stopped for good, in one folder
environment.py             environment.json: under which conditions a run trained: code, versi
event_lines.py             One event of events.jsonl as one line for a person
forecast.py                How much of the time a run with failures gets useful work done, and
goodput.py                 Where every second since a run's first attempt went
heartbeat.py               What this rank is doing, for whoever watches it: one small file, re
history.py                 history.jsonl: the decisions of a run, append-only: segments, skips
presence.py                Whether a run lives now, what its first rank is doing, and whether
records.py                 The line files of a run (metrics.jsonl, events.jsonl, ...): one str
requests.py                What asks a run to end early, and how all ranks come to do so after
resuming.py                Whether a run goes on, and from where: what its folder holds agains
run_folder.py              The folder a run leaves behind: `runs/<run>/`, made once, by rank 0
supervisor_log.py          The record of a run as its supervisor uses it, between two attempts
trust.py                   Who else could write a run: folders that strangers may change are r
"""
