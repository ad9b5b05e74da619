"""Basics of every process: errors, exact values, durable files, the command line.

command_line.py            Arguments that all commands take, and how they refuse
cores.py                   CPU cores and open files that this process may use
durable.py                 Files and names that a power cut leaves whole or absent
errors.py                  UserError: what a user can put right
exits.py                   Exit statuses of the run and of all commands
jsonl.py                   Lines of JSON with digests: the files of a run that grow
launcher_variables.py      Environment variables that another launcher left in the shell
lossy_output.py            Standard output that a closed terminal or a full disk cannot break
parent_death.py            A signal for this process when its parent dies
paths.py                   Folders of this checkout
redaction.py               Removal of secrets from whatever is written or sent
run_variables.py           Environment variables from the launcher to its ranks
strict_json.py             A JSON file, read strictly
table.py                   Aligned columns and counts for people
tail.py                    Lines of a file from its end
units.py                   Units of memory and time
values.py                  Exact reading of what a person gave, and the declaration of knobs
"""
