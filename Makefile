# The verbs: thin aliases of `python -m folder.noun`. `make help` lists them.
#
#   RECIPE=tiny  NPROC=1  OVERRIDES="zero=3 run=tiny-z3"  WORLD=64  FIND=lr  PYTHON=/path/to/python
#   RANK=517  RUN=tiny  STEP=100  PROMPT="The Congress"
#
# PYTHON chooses an interpreter that is used as it is (its torch is never replaced); without it a
# virtual environment is made in .venv on first use.

RECIPE ?= tiny
NPROC ?= 1
OVERRIDES ?=
WORLD ?=
RANK ?= 0
ALL ?=
FIND ?=
PORT ?= 6006
RUN ?= $(RECIPE)
STEP ?=
PROMPT ?=
TESTS ?= tests

# A misspelt variable would be ignored by make, and another run started than was meant.
KNOWN := RECIPE NPROC OVERRIDES WORLD RANK ALL FIND PORT TESTS RUN STEP PROMPT PYTHON
GIVEN := $(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(name)))
STRANGE := $(filter-out $(KNOWN) MAKEFLAGS SHELL,$(GIVEN))
ifneq ($(STRANGE),)
$(error refused: $(STRANGE): not a variable of this Makefile ($(KNOWN)); knobs go into OVERRIDES="zero=3 run=x")
endif

SHELL := /bin/bash
.DEFAULT_GOAL := help
export PYTHONPATH := $(CURDIR)
export PROMPT

ifdef PYTHON
READY := python-given
else
PYTHON := $(CURDIR)/.venv/bin/python
READY := .venv/ready
endif

.PHONY: help pretrain test lint format show layouts dryrun recipes knobs checkpoints verify export sample tensorboard bench matrix python-given

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

.venv/ready: requirements.txt launch/setup.py
	@python3 launch/setup.py .venv

python-given: launch/setup.py
	@"$(PYTHON)" launch/setup.py --check

pretrain: $(READY) ## train RECIPE on NPROC ranks of this machine
	@exec "$(PYTHON)" -m launch.local --nproc "$(NPROC)" -- "recipe=$(RECIPE)" $(OVERRIDES)

show: $(READY) ## composed recipe, layout, DeepSpeed JSON, memory; starts nothing (WORLD=ranks)
	@exec "$(PYTHON)" -m recipes.show $(if $(WORLD),--world "$(WORLD)") -- "$(RECIPE)" $(OVERRIDES)

layouts: $(READY) ## legal layouts of RECIPE on WORLD ranks, and why others are not (ALL=1: all)
	@exec "$(PYTHON)" -m parallel.layouts $(if $(WORLD),--world "$(WORLD)") $(if $(ALL),--all) -- "$(RECIPE)" $(OVERRIDES)

dryrun: $(READY) ## one RANK's part of RECIPE on WORLD ranks, built without memory
	@exec "$(PYTHON)" -m runtime.dryrun --rank "$(RANK)" $(if $(WORLD),--world "$(WORLD)") -- "$(RECIPE)" $(OVERRIDES)

recipes: $(READY) ## the recipes, with size and layout
	@exec "$(PYTHON)" -m recipes.list

knobs: $(READY) ## every knob with unit and meaning (FIND=text)
	@exec "$(PYTHON)" -m recipes.knobs $(if $(FIND),--find "$(FIND)")

checkpoints: $(READY) ## the checkpoints of RUN
	@exec "$(PYTHON)" -m checkpoint.list "$(RUN)"

verify: $(READY) ## read every byte of RUN's checkpoints and compare digests (STEP=)
	@exec "$(PYTHON)" -m checkpoint.verify "$(RUN)" $(if $(STEP),--step "$(STEP)")

export: $(READY) ## a checkpoint of RUN as a Hugging Face folder (STEP=)
	@exec "$(PYTHON)" -m checkpoint.export "$(RUN)" $(if $(STEP),--step "$(STEP)")

sample: $(READY) ## text from RUN, a run or an exported folder (STEP= PROMPT=)
	@exec "$(PYTHON)" -m checkpoint.sample "$(RUN)" --prompt "$$PROMPT" $(if $(STEP),--step "$(STEP)")

tensorboard: $(READY) ## look at runs/ on http://localhost:PORT
	@exec "$(PYTHON)" -m tensorboard.main --logdir runs --port "$(PORT)"

test: $(READY) ## the whole test suite
	@exec "$(PYTHON)" -m pytest $(TESTS)

lint: $(READY) ## ruff check and format check
	@"$(PYTHON)" -m ruff check . && "$(PYTHON)" -m ruff format --check .

format: $(READY) ## ruff format and fix
	@"$(PYTHON)" -m ruff format . && "$(PYTHON)" -m ruff check --fix .

bench: $(READY) ## tokens/s against a bare torch loop and the Hugging Face Trainer
	@exec "$(PYTHON)" -m benchmarks.step

matrix: $(READY) ## every layout of up to 8 ranks against a plain loop (WORLD= FIND="t2 bf16")
	@exec "$(PYTHON)" -m benchmarks.matrix $(if $(WORLD),--world "$(WORLD)") $(if $(FIND),--find "$(FIND)")
