"""The planner: will it fit, how long, how much, which layout - before anything starts. No torch.

    recipe, layout --recipe_jobs--> Job, Machine --memory_use, step_time--> Option --> Ranking
    published runs  --published_rows--> the same Job, Machine --fit, validation--> errors, ranges

constants.py        the constants of the time model, each with unit, range, reason and its rows
machine.py          a GPU, its memory and links: data sheets, cluster files
workload.py         a training step: shape of the model, axes, engine
step_time.py        seconds of a step by kind
compute_time.py     seconds of matrix products, attention and memory-bound work
communication_time.py   seconds of collectives, by group
memory_use.py       bytes of a rank by kind, for every pipeline stage
recipe_jobs.py      a recipe and its layout as a job, a cluster file as a machine
search.py           every legal layout with memory and time, best first
outlook.py          tokens/s, MFU, days, GPU-hours, cost, goodput of a whole run
ranges.py           the range around a predicted speed
explanation.py      what was found, as text and as plain values
choose.py           knobs that say auto, why other choices lost, what a run should reach
compute_budget.py   the best size and tokens for a number of FLOPs
drawings.py         SVG pictures of a plan, of the validation, of scaling
scaling.py          speed of 7b and 70b from 8 to 4,096 GPUs
published_rows.py   rows of published runs as jobs
own_runs.py         runs of this site as such rows
fit.py              fits the constants marked as fitted
validation.py       predictions against published runs
published/          data sheets and published runs, with their sources
"""
