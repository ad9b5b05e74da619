"""What every process needs: errors, exact values, files that last, the command line.

command_line.py            What the commands have in common: their words, and how they refuse
cores.py                   How many cores this process may use: those it is bound to, and the
durable.py                 Files and names that are there after a power cut, or not at all
errors.py                  Errors that a user can put right
exits.py                   How the Python entries end: what an exit status asks of whoever sta
gpus.py                    GPUs that this host shows, found without torch
lossy_output.py            Standard output and error of a process that outlives whoever reads
paths.py                   Folders of this checkout
redaction.py               Takes secrets out of whatever is written down or sent: values of se
strict_json.py             Reads a JSON file by one strict rule: RFC 8259, UTF-8 without byte-
table.py                   Rows of text in aligned columns, for the commands that print
tail.py                    Lines of a file from its end: what is newest of a record costs the
units.py                   Units of memory and time, and how a person reads them
values.py                  What a person gave: read exactly, or refused with what is wrong
parent_death.py            Asks the kernel for a signal when the parent process ends
run_variables.py           Environment variables through which the launcher speaks to ranks
"""
