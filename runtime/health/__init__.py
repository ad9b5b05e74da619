"""The verdict on each step, and what follows from it.

health_monitor.py          judges each step of an attempt, between backward and update
recovery.py                rewinds the run, or stops it, after a verdict that ends the attempt
verdict.py                 the judge: a pure function of a step and the steps before it
"""
