"""Recipes of runs: YAML files, config group options, and the schema that checks them.

check.py                   Plain values to a frozen Recipe: names, types and ranges
compose.py                 Recipe, config group options and overrides, composed with Hydra
faults.py                  Knobs of the health policy and of alerts
rules.py                   Rules between knobs that need no layout
schema.py                  Every knob: name, type, default, unit, meaning and range
"""
