# The commands: `make X` runs commands/X.py. `make help` lists them.
#
#   RECIPE=tiny  OVERRIDES="zero=3 run=tiny-z3"  FIND=lr  PYTHON=/path/to/python
#   NPROC=8 ranks on each host  WORLD=64 ranks of the whole run  HOSTFILE=hosts   (any of the three)
#   INCLUDE=a@b:0,1  EXCLUDE=c  VIA=ssh|pdsh  SSH="ssh -p 2222"  PASS="NAME OTHER"  SPARES=1
#   IN=path-or-glob  OUT=corpora/mine  TOKENIZER=path  VOCAB=32000  WORKERS=8  CORPUS=corpora/mine
#   SWEEP="zero=1,2,3 micro_batch=1,2"  STEPS=20  REPEATS=3  RUNS="a b c"  NAME=folder
#   RANK=val_loss  SEEDS=3
#   RANK=517  RUN=tiny  STEP=100  PROMPT="The Congress"  DOC=17  TEXT=1  A=run  B=run  QUICK=1
#   NOW=1  KIND=attempt,saved  FOLLOW=1  MTBF=2.8h
#   SKIP="86:91 120:125"  EFFECT=advance|no_update  SEGMENT=0  TO=tiny-b  DECAY=0.8  WHY="loss spike"
#   CLUSTER=h100  NODES=128  VERSUS="zero=3|zero=1"  JSON=1  PICTURE=plan.svg  GPU_HOURS=10000  MONEY=50000  DAYS=14
#   ROWS=other.csv  CURVES=scaling.svg
#   TOKENS=100  TEMPERATURE=0.8  TOP_P=0.95  SEED=0  DTYPE=bf16|fp32
#
# PYTHON chooses an interpreter that is used as it is (its torch is never replaced); without it a
# virtual environment is made in .venv on first use.

RECIPE ?= tiny
NPROC ?=
HOSTFILE ?=
INCLUDE ?=
EXCLUDE ?=
VIA ?=
SSH ?=
PASS ?=
SPARES ?=
OVERRIDES ?=
WORLD ?=
# In the environment RANK is torchrun's.
ifneq ($(origin RANK),command line)
override RANK := 0
endif
ALL ?=
FIND ?=
PORT ?= 6006
RUN ?= $(RECIPE)
STEP ?=
SKIP ?=
EFFECT ?=
DECAY ?=
SEGMENT ?=
TO ?=
WHY ?=
PROMPT ?=
TEMPERATURE ?=
TOP_P ?=
SEED ?=
DTYPE ?=
SWEEP ?=
STEPS ?=
REPEATS ?=
SEEDS ?=
RUNS ?=
NAME ?=
DOC ?=
TOKENS ?=
TEXT ?=
EVERY ?=
NOW ?=
KIND ?=
FOLLOW ?=
MTBF ?=
A ?=
B ?=
TESTS ?= tests
IN ?=
OUT ?=
TOKENIZER ?=
VOCAB ?= 32000
WORKERS ?=
CORPUS ?= corpora/sotu
QUICK ?=
CLUSTER ?=
NODES ?=
VERSUS ?=
JSON ?=
PICTURE ?=
GPU_HOURS ?=
MONEY ?=
DAYS ?=
ROWS ?=
CURVES ?=

# The variables that each command reads. A variable on the command line that none of the goals reads
# is refused, as is a misspelt one: it would be ignored, and another run started than was meant.
PLACES := NPROC WORLD HOSTFILE INCLUDE EXCLUDE VIA SSH PASS SPARES
READ_BY_help :=
READ_BY_pretrain := RECIPE OVERRIDES $(PLACES)
READ_BY_doctor := $(PLACES)
READ_BY_show := RECIPE OVERRIDES ALL $(PLACES)
READ_BY_layouts := RECIPE OVERRIDES ALL $(PLACES)
READ_BY_plan := RECIPE OVERRIDES CLUSTER NODES WORLD VERSUS JSON PICTURE
READ_BY_budget := OVERRIDES CLUSTER NODES GPU_HOURS MONEY DAYS
READ_BY_plan-check := ROWS RUNS PICTURE CURVES
READ_BY_dryrun := RECIPE OVERRIDES RANK $(PLACES)
READ_BY_recipes :=
READ_BY_knobs := FIND
READ_BY_runs :=
READ_BY_status := RUN
READ_BY_events := RUN KIND FOLLOW
READ_BY_stop := RUN NOW
READ_BY_goodput := RUN MTBF
READ_BY_checkpoints := RUN
READ_BY_verify := RUN STEP ALL
READ_BY_rewind := RUN STEP SKIP EFFECT SEGMENT WHY
READ_BY_branch := RUN STEP SEGMENT TO WHY OVERRIDES
READ_BY_merge := RUN STEPS DECAY TO WHY OVERRIDES
READ_BY_history := RUN
READ_BY_reproduce := RUN NAME
READ_BY_export := RUN STEP OUT TOKENIZER DTYPE
READ_BY_sample := RUN STEP PROMPT TOKENS TEMPERATURE TOP_P SEED
READ_BY_corpus := IN OUT TOKENIZER WORKERS OVERRIDES
READ_BY_corpus-import := IN OUT TOKENIZER QUICK OVERRIDES
READ_BY_corpus-verify := CORPUS WORKERS
READ_BY_corpus-info := CORPUS
READ_BY_tokenizer := IN VOCAB OUT OVERRIDES
READ_BY_compare := RECIPE RUNS SWEEP STEPS REPEATS SEEDS RANK NAME OVERRIDES $(PLACES)
READ_BY_profile := RUN STEPS OVERRIDES $(PLACES)
READ_BY_replay := RUN STEP SEGMENT $(PLACES)
READ_BY_tensorboard := RUN PORT
READ_BY_audit := RUN STEP SEGMENT DOC TOKENS TEXT EVERY
READ_BY_audit-diff := A B
READ_BY_test := TESTS
READ_BY_lint :=
READ_BY_format :=
READ_BY_bench :=
READ_BY_matrix := WORLD FIND
READ_BY_chaos := FIND
READ_BY_crash := FIND
# RUN stands for the recipe of its name, so every command that reads RUN takes RECIPE, too.
OF_GOALS = $(foreach goal,$(or $(MAKECMDGOALS),help),$(READ_BY_$(goal)))
READ = PYTHON $(OF_GOALS) $(if $(filter RUN,$(OF_GOALS)),RECIPE)

KNOWN := PYTHON RECIPE $(PLACES) OVERRIDES RANK ALL FIND PORT TESTS RUN STEP PROMPT IN OUT TOKENIZER VOCAB WORKERS \
	CORPUS SWEEP STEPS REPEATS RUNS NAME DOC TEXT EVERY TOKENS A B NOW KIND FOLLOW MTBF QUICK SKIP EFFECT SEGMENT TO DECAY WHY \
	TEMPERATURE TOP_P SEED SEEDS DTYPE CLUSTER NODES VERSUS JSON PICTURE GPU_HOURS MONEY DAYS ROWS CURVES
GIVEN := $(strip $(filter-out MAKEFLAGS SHELL,$(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(name)))))
STRANGE := $(strip $(filter-out $(KNOWN),$(GIVEN)))
ifneq ($(STRANGE),)
$(error refused: $(STRANGE): not a variable of this Makefile ($(KNOWN)); knobs go into OVERRIDES="zero=3 run=x")
endif
UNREAD := $(strip $(filter-out $(READ),$(GIVEN)))
ifneq ($(UNREAD),)
$(error refused: make $(or $(MAKECMDGOALS),help) does not read $(sort $(UNREAD)), only $(sort $(READ)); leave $(if $(word 2,$(UNREAD)),them,it) out)
endif
# An empty value comes from a shell variable that is not set; it would stand for the default.
EMPTY := $(strip $(foreach name,$(filter-out OVERRIDES PROMPT WHY,$(GIVEN)),$(if $(strip $(value $(name))),,$(name))))
ifneq ($(EMPTY),)
$(error refused: $(EMPTY)= is empty: a shell variable that is not set? give a value, or leave $(if $(word 2,$(EMPTY)),them,it) out)
endif
WRONG := $(strip $(foreach name,$(filter ALL TEXT NOW FOLLOW QUICK,$(GIVEN)),$(if $(filter-out 0 1,$(value $(name))),$(name)=$(value $(name)))))
ifneq ($(WRONG),)
$(error refused: $(WRONG): give 1 to switch it on, or 0)
endif

SHELL := /bin/bash
# Files are UTF-8 and what is printed never ends a command, whatever the locale.
export PYTHONUTF8 ?= 1
.DEFAULT_GOAL := help
# An interpreter of your own comes with your PYTHONPATH (modules of a cluster); .venv has all it needs.
export PYTHONPATH := $(CURDIR)$(if $(PYTHON),$(if $(PYTHONPATH),:$(value PYTHONPATH)))
# Read as they were typed: make looks for no $ in them, and the shell that it starts sees them as
# variables, so no brace, quote, * or ; in them is ever its own. Python splits OVERRIDES by the
# shell's rules for quotes and blanks.
$(foreach name,$(filter $(KNOWN),$(GIVEN)),$(eval override $(name) := $$(value $(name))))
export $(filter-out PYTHON TESTS RANK,$(KNOWN))
PLACE = "--nproc=$$NPROC" "--world=$$WORLD" "--hostfile=$$HOSTFILE" "--include=$$INCLUDE" \
	"--exclude=$$EXCLUDE" "--via=$$VIA" "--ssh=$$SSH" "--pass=$$PASS" "--spares=$$SPARES"
ARGUMENTS = "--overrides=$$OVERRIDES" --

ifdef PYTHON
READY := python-given
READY_FOR_TESTS := python-given-for-tests
else
PYTHON := $(CURDIR)/.venv/bin/python
READY := .venv/ready
READY_FOR_TESTS := .venv/ready
endif

.PHONY: help pretrain test lint format show plan budget plan-check layouts dryrun recipes knobs runs status events stop goodput checkpoints verify export sample tensorboard bench \
	matrix crash chaos rewind branch merge history reproduce python-given python-given-for-tests corpus corpus-import corpus-verify corpus-info tokenizer compare profile replay audit audit-diff doctor

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

.venv/ready: requirements.txt launch/setup.py
	@python3 launch/setup.py .venv

python-given python-given-for-tests: launch/setup.py
	@command -v "$(PYTHON)" >/dev/null || { echo "refused: PYTHON=$(PYTHON): no such program; leave it" \
	  "out to have a virtual environment made in .venv" >&2; exit 93; }
	@"$(PYTHON)" launch/setup.py --check $(if $(findstring tests,$@),tests)

pretrain: $(READY) ## train RECIPE on NPROC ranks of this machine (all its GPUs), or of each host of HOSTFILE (WORLD= SPARES=)
	@exec "$(PYTHON)" -m commands.pretrain $(PLACE) $(ARGUMENTS) "recipe=$$RECIPE"

doctor: $(READY) ## check this machine, or every host of HOSTFILE, and the links between them
	@exec "$(PYTHON)" -m commands.doctor $(PLACE)

show: $(READY) ## layout, memory, time, cost, knobs of RECIPE; starts nothing (NPROC=, HOSTFILE= or WORLD=ranks, ALL=1)
	@exec "$(PYTHON)" -m commands.show $(PLACE) $(if $(filter 1,$(ALL)),--all) $(ARGUMENTS) "$$RECIPE"

layouts: $(READY) ## legal layouts of RECIPE on WORLD ranks, and why others are not (ALL=1: all)
	@exec "$(PYTHON)" -m commands.layouts $(PLACE) $(if $(filter 1,$(ALL)),--all) $(ARGUMENTS) "$$RECIPE"

plan: $(READY) ## which layout, will it fit, how long, how much (CLUSTER= NODES= VERSUS= JSON=1 PICTURE=)
	@exec "$(PYTHON)" -m commands.plan "--cluster=$$CLUSTER" "--nodes=$$NODES" "--world=$$WORLD" \
	  "--versus=$$VERSUS" "--picture=$$PICTURE" $(if $(JSON),--json) $(ARGUMENTS) "$$RECIPE"

budget: $(READY) ## the best size for GPU_HOURS=, MONEY= or DAYS=, and its plan (CLUSTER= NODES=)
	@exec "$(PYTHON)" -m commands.budget "--gpu-hours=$$GPU_HOURS" "--money=$$MONEY" "--days=$$DAYS" \
	  "--nodes=$$NODES" "--cluster=$$CLUSTER" $(ARGUMENTS)

plan-check: $(READY) ## the planner against published runs (ROWS=other.csv RUNS="a b" PICTURE= CURVES=)
	@exec "$(PYTHON)" -m commands.plan_check "--rows=$$ROWS" "--runs=$$RUNS" "--picture=$$PICTURE" "--curves=$$CURVES"

dryrun: $(READY) ## one RANK's part of RECIPE on WORLD ranks, built without memory
	@exec "$(PYTHON)" -m commands.dryrun --rank "$(RANK)" $(PLACE) $(ARGUMENTS) "$$RECIPE"

recipes: $(READY) ## the recipes, with size and layout
	@exec "$(PYTHON)" -m commands.recipes

knobs: $(READY) ## every knob with unit and meaning (FIND=text)
	@exec "$(PYTHON)" -m commands.knobs $(if $(FIND),--find "$$FIND")

runs: $(READY) ## all runs: state, steps, loss, checkpoint, the newest last
	@exec "$(PYTHON)" -m commands.runs

status: $(READY) ## what RUN (default: the newest run) is doing now; how it ended, and the next command
	@exec "$(PYTHON)" -m commands.status $(if $(filter RUN,$(GIVEN)),"$$RUN")

events: $(READY) ## what happened in RUN, newest last (KIND=attempt,saved FOLLOW=1)
	@exec "$(PYTHON)" -m commands.events "$$RUN" "--kind=$$KIND" $(if $(filter 1,$(FOLLOW)),--follow)

stop: $(READY) ## ask RUN to save and end after its step, and wait (NOW=1: without a save)
	@exec "$(PYTHON)" -m commands.stop "$$RUN" $(if $(filter 1,$(NOW)),--now)

goodput: $(READY) ## where every second of RUN went; the best checkpoint.interval (MTBF=2.8h)
	@exec "$(PYTHON)" -m commands.goodput "$$RUN" "--mtbf=$$MTBF"

checkpoints: $(READY) ## the checkpoints of RUN
	@exec "$(PYTHON)" -m commands.checkpoints "$$RUN"

verify: $(READY) ## read every byte of RUN's checkpoints and compare digests (STEP=; ALL=1: abandoned ones, too)
	@exec "$(PYTHON)" -m commands.verify "$$RUN" $(if $(STEP),--step "$$STEP") $(if $(filter 1,$(ALL)),--all)

rewind: $(READY) ## take RUN back to STEP and leave out the data of the steps SKIP="86:91" (EFFECT= SEGMENT= WHY=)
	@exec "$(PYTHON)" -m commands.rewind "$$RUN" "--step=$$STEP" "--skip=$$SKIP" "--effect=$$EFFECT" \
	  "--segment=$$SEGMENT" "--why=$$WHY"

branch: $(READY) ## a new run TO from STEP of RUN, linked, not copied (OVERRIDES= SEGMENT= WHY=)
	@exec "$(PYTHON)" -m commands.branch "--step=$$STEP" "--segment=$$SEGMENT" "--to=$$TO" "--why=$$WHY" \
	  "--overrides=$$OVERRIDES" -- "$$RUN"

merge: $(READY) ## a new run TO with the average of checkpoints of RUN (STEPS=160:200:20 DECAY= OVERRIDES= WHY=)
	@exec "$(PYTHON)" -m commands.merge "--steps=$$STEPS" "--decay=$$DECAY" "--to=$$TO" "--why=$$WHY" \
	  "--overrides=$$OVERRIDES" -- "$$RUN"

history: $(READY) ## the lineage of RUN: segments, skips, changes, branches
	@exec "$(PYTHON)" -m commands.history "$$RUN"

reproduce: $(READY) ## train RUN again from its record alone and compare every number (NAME=)
	@exec "$(PYTHON)" -m commands.reproduce "$$RUN" "--name=$$NAME"

export: $(READY) ## a checkpoint of RUN as a Hugging Face folder (STEP= DTYPE=fp32 OUT= TOKENIZER=)
	@exec "$(PYTHON)" -m commands.export "$$RUN" $(if $(STEP),--step "$$STEP") $(if $(OUT),--out "$$OUT") \
	  $(if $(TOKENIZER),--tokenizer "$$TOKENIZER") $(if $(DTYPE),--dtype "$$DTYPE")

sample: $(READY) ## text from RUN, a run or an exported folder (PROMPT= TOKENS= TEMPERATURE= TOP_P= SEED= STEP=)
	@exec "$(PYTHON)" -m commands.sample "$$RUN" "--prompt=$$PROMPT" $(if $(STEP),--step "$$STEP") \
	  $(if $(TOKENS),"--tokens=$$TOKENS") $(if $(TEMPERATURE),"--temperature=$$TEMPERATURE") \
	  $(if $(TOP_P),"--top-p=$$TOP_P") $(if $(SEED),"--seed=$$SEED")

# One thread of the tokenizer for each worker process.
corpus: $(READY) ## build a corpus from text: IN= OUT= TOKENIZER= (WORKERS=, OVERRIDES="knob=value")
	@TOKENIZERS_PARALLELISM=false exec "$(PYTHON)" -m commands.corpus --in "$$IN" --out "$$OUT" \
	  --tokenizer "$$TOKENIZER" $(if $(WORKERS),--workers "$$WORKERS") $(ARGUMENTS)

corpus-import: $(READY) ## a corpus from Megatron, datatrove or flat token files: IN= OUT= TOKENIZER= (QUICK=1)
	@exec "$(PYTHON)" -m commands.corpus_import --in "$$IN" --out "$$OUT" --tokenizer "$$TOKENIZER" \
	  $(if $(filter 1,$(QUICK)),--quick) $(ARGUMENTS)

corpus-verify: $(READY) ## read every byte of CORPUS and compare (WORKERS=)
	@exec "$(PYTHON)" -m commands.corpus_verify "$$CORPUS" $(if $(WORKERS),--workers "$$WORKERS")

corpus-info: $(READY) ## what CORPUS holds, how it was made, what was dropped
	@exec "$(PYTHON)" -m commands.corpus_info "$$CORPUS"

tokenizer: $(READY) ## train a byte-level BPE: IN= VOCAB= (OUT=, OVERRIDES="knob=value")
	@exec "$(PYTHON)" -m commands.tokenizer --in "$$IN" --vocab "$$VOCAB" \
	  $(if $(OUT),--out "$$OUT") $(ARGUMENTS)

compare: $(READY) ## run SWEEP side by side for STEPS steps (REPEATS= SEEDS= RANK=val_loss NAME=), or report RUNS="a b"
	@exec "$(PYTHON)" -m commands.compare $(if $(RUNS),--runs "$$RUNS") --recipe "$$RECIPE" $(PLACE) \
	  --sweep "$$SWEEP" $(if $(STEPS),--steps "$$STEPS") $(if $(REPEATS),--repeats "$$REPEATS") \
	  $(if $(filter RANK,$(GIVEN)),--rank "$(RANK)") $(if $(SEEDS),--seeds "$$SEEDS") \
	  $(if $(NAME),--name "$$NAME") $(ARGUMENTS)

profile: $(READY) ## where the time of RUN's steps goes: table, and trace for Perfetto (STEPS=10:15)
	@exec "$(PYTHON)" -m commands.profile --run "$$RUN" $(PLACE) \
	  $(if $(STEPS),--steps "$$STEPS") $(ARGUMENTS)

replay: $(READY) ## a suspicious STEP of RUN again, twice, compared by bits (SEGMENT=)
	@exec "$(PYTHON)" -m commands.replay "--step=$$STEP" "--segment=$$SEGMENT" $(PLACE) -- "$$RUN"

tensorboard: $(READY) ## look at runs/, or one RUN or comparison, on http://localhost:PORT
	@exec "$(PYTHON)" -m commands.tensorboard $(if $(filter RUN,$(GIVEN)),"--run=$$RUN") "--port=$$PORT"

audit: $(READY) ## what RUN trained on, held against its record (STEP= TEXT=1, DOC= TOKENS=, EVERY= SEGMENT=)
	@exec "$(PYTHON)" -m commands.audit "$$RUN" $(if $(STEP),--step "$$STEP") $(if $(SEGMENT),--segment "$$SEGMENT") $(if $(DOC),--doc "$$DOC") $(if $(TOKENS),"--tokens=$$TOKENS") $(if $(filter 1,$(TEXT)),--text) $(if $(EVERY),--every "$$EVERY")

audit-diff: $(READY) ## where the batches of runs A and B begin to differ
	@exec "$(PYTHON)" -m commands.audit_diff -- "$$A" "$$B"

test: $(READY_FOR_TESTS) ## the whole test suite, two files at a time
	@exec "$(PYTHON)" -m pytest -n 2 --dist loadfile $(TESTS)

lint: $(READY_FOR_TESTS) ## ruff check and format check
	@"$(PYTHON)" -m ruff check . && "$(PYTHON)" -m ruff format --check .

format: $(READY_FOR_TESTS) ## ruff format and fix
	@"$(PYTHON)" -m ruff format . && "$(PYTHON)" -m ruff check --fix .

bench: $(READY) ## tokens/s against a bare torch loop and the Hugging Face Trainer
	@exec "$(PYTHON)" -m benchmarks.step

matrix: $(READY_FOR_TESTS) ## every layout of up to 8 ranks against a plain loop (WORLD= FIND="t2 bf16")
	@exec "$(PYTHON)" -m benchmarks.matrix $(if $(WORLD),--world "$$WORLD") $(if $(FIND),--find "$$FIND")

chaos: $(READY_FOR_TESTS) ## faults of hosts, ranks and networks on three hosts, as root: a table (FIND=words)
	@exec "$(PYTHON)" -m benchmarks.chaos $(if $(FIND),--find "$$FIND")

crash: $(READY_FOR_TESTS) ## SIGKILL at every moment of a save, then the run goes on (FIND="async torn")
	@exec "$(PYTHON)" -m benchmarks.crash $(if $(FIND),--find "$$FIND")
