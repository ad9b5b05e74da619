"""Recipes of runs: YAML files, config group options, and the schema that checks them.

check.py                   Plain values to a frozen Recipe: names, types and ranges
compose.py                 Recipe, config group options and overrides, composed with Hydra
composed_file.py           A composed recipe as a file for ranks and restarts; digests
faults.py                  Knobs of health, alerts, silence and restarts
interpolation.py           Interpolations ${...}: which are allowed, and their values
overrides.py               Overrides of a command line, and sweeps
output_knobs.py            Knobs of what a run writes, saves and watches
rules.py                   Rules between knobs that need no layout
schema.py                  Every knob: name, type, default, unit, meaning and range
"""
