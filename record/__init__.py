"""The folder of a run, and what is written in it.

alerts.py                  sends an alert to people: an event, a line on the console, a command
attempts.py                the attempts of a run: how each ended, how far it came, what it cost
bundle.py                  the folder with everything about a run that stopped for good
environment.py             environment.json: code, versions and hardware of every start
event_lines.py             one event of events.jsonl as one line for a person
failure.py                 the exception that ended a rank: type, text, place and phase
forecast.py                expected goodput of a run with failures, and the best save interval
goodput.py                 the wall clock of a run, divided into useful and lost seconds
heartbeat.py               the sign of life that each rank writes for the watchdog
history.py                 history.jsonl: segments, skips, overrides and branches of a run
predictions.py             what the plan predicted beside what the run measured
presence.py                locks and signs of life: is a run alive, and who supervises it
records.py                 reading, repairing and appending the JSON-lines files of a run
requests.py                signals and `make stop`: how all ranks agree to end after one step
resuming.py                whether a start continues a run, from which step, or is refused
run_folder.py              runs/<run>/: made once by rank 0, guarded by a lock and a lease
run_status.py               the state of a run as `make status` and `make runs` show it
supervisor_log.py          what the supervisor reads and writes between two attempts
trust.py                   refuses run folders that untrusted users could change
"""
