# make toy        the paper's problem on a laptop: prepare the toy world, run its arms, judge, print two tables
# make replicate  the paper's claims on two toy worlds: ARMS x SEEDS x WORLDS, into results/toy; goes on where it was
# make test       the tests
# make clean      remove what toy and test made
PYTHON ?= python3
PY ?= .venv/bin/python
RUNS ?= runs/$(or $(filter replicate,$(MAKECMDGOALS)),toy)
RESULTS ?= results/toy
SEEDS ?= 0 1 2 3 4
WORLDS ?= 0 1
JOBS ?= 2
TOY ?= data/toy
MAKEFLAGS += --no-print-directory
# ARMS: some of the names below, or all; JOBS: runs at a time, each with one thread; FLAGS: more flags for every run;
# WORLDS: numbers, or notail, rich and kin, which change one thing in world 0
# PY=python3: a Python that has the packages, and no virtual environment is made

# an arm's name -> its command; the run's folder is $(RUNS)/<arm>-s<seed>
base = grpo.py --name base --steps 0
grpo = grpo.py
hintonly = hint.py
uft001 = uft.py --name uft001 --sft-coef 0.001
uft002 = uft.py --name uft002 --sft-coef 0.002
opd = opd.py --name opd --mix pure
opd-annealed = opd.py --name opd-annealed --mix annealed
opd-gated = opd.py --name opd-gated --mix gated
reopd = reopd.py
vapo = vapo.py --name vapo --critic-loss mse
vapohl = vapo.py --name vapohl --critic-loss hlgauss
stack = stack.py
ALL = vapo vapohl base grpo hintonly uft001 uft002 opd opd-annealed opd-gated reopd stack
# for replicate alone: who teaches, other readings of three arms, other settings of the critics
teacher = grpo.py --name teacher --steps 0 --model $(TOY)/teacher
uft01 = uft.py --name uft01 --sft-coef 0.01
uft02 = uft.py --name uft02 --sft-coef 0.02
opd-group = opd.py --name opd-group --mix gated --gate group
reopd-staircase = reopd.py --name reopd-staircase --replay staircase
vapo-mc = vapo.py --name vapo-mc --critic-loss mse --lambda-floor 1
vapohl-mc = vapo.py --name vapohl-mc --critic-loss hlgauss --lambda-floor 1
vapo-fast = vapo.py --name vapo-fast --critic-loss mse --critic-lr 1e-3
vapohl-fast = vapo.py --name vapohl-fast --critic-loss hlgauss --critic-lr 1e-3
READINGS = uft01 uft02 opd-group reopd-staircase vapo-mc vapohl-mc vapo-fast vapohl-fast

CHANGED = notail rich kin
# the untrained have one seed, other readings three; a world's folder; all runs wanted of a world
seeds = $(if $(filter base teacher,$1),0,$(if $(filter $(READINGS),$1),$(wordlist 1,3,$(SEEDS)),$(SEEDS)))
world = $(TOY)$(if $(filter-out 0,$1),/$(if $(filter $(CHANGED),$1),,seed)$1)
wanted = $(foreach a,$(patsubst all,$(ALL),$(ARMS)),$(patsubst %,$(RUNS)/$a-s%/outputs.jsonl,$(call seeds,$a)))
EVAL = --eval $(TOY)/sparse.jsonl,$(TOY)/cross.jsonl,$(TOY)/old.jsonl,$(TOY)/easy.jsonl,$(TOY)/worn.jsonl
venv = $(if $(filter .venv/%,$(PY)),.venv/ready)

toy: data/toy/images/ready
	@$(MAKE) -j$(JOBS) runs SEEDS=0 ARMS="$(or $(ARMS),base grpo hintonly)"
	$(PY) judge.py $(RUNS)/* --judge rule
	$(PY) analyze.py sparsity main --runs $(RUNS)

replicate: $(foreach w,$(WORLDS),$(call world,$w)/$(if $(filter $(CHANGED),$w),train.jsonl,images/ready))
	@echo "to watch the runs: tail -f $(RUNS)/world*/*.log"
	-@$(MAKE) -k -j$(JOBS) $(WORLDS:%=world%) RUNS=$(RUNS)
	$(PY) -m data.toy.replicate --runs $(RUNS) --results $(RESULTS)

world%:
	@$(MAKE) -k runs RUNS=$(RUNS)/$@ TOY=$(call world,$*) QUIET=1 \
		ARMS="$(or $(ARMS),all teacher $(if $(filter 0,$*),$(READINGS)))"

runs: $(wanted)

seed = $(lastword $(subst -s, ,$*))
arm = $(*:%-s$(seed)=%)
$(RUNS)/%/outputs.jsonl:
	$(if $($(arm)),,$(error there is no arm $(arm): choose from $(ALL) teacher $(READINGS)))
	@mkdir -p $(RUNS)
	@OMP_NUM_THREADS=1 TQDM_POSITION=$(if $(filter base grpo,$(arm)),0,1) \
		$(PY) $(firstword $($(arm))) --toy $(TOY) --seed $(seed) --runs $(RUNS) $(if $(QUIET),$(EVAL)) $(FLAGS) \
		$(wordlist 2,9,$($(arm))) \
		$(if $(QUIET),>> $(@D).log 2>&1 \
		|| { echo "$(@D) stopped:"; tail -n 2 $(@D).log; exit 1; }; \
		echo "$(@D) is finished: $$(ls $(RUNS)/*/outputs.jsonl | wc -l) of $(words $(wanted))")

data/toy/images/ready: $(venv) data/toy/prepare.py $(wildcard data/toy/*.jsonl)
	$(PY) -m data.toy.prepare
	@touch $@

$(CHANGED:%=data/toy/%/train.jsonl): data/toy/%/train.jsonl: | data/toy/images/ready
	$(PY) -m data.toy.changed $*

data/toy/seed%/images/ready: $(venv)
	$(PY) -m data.toy.prepare --seed $* $(if $(wildcard data/toy/seed$*/readme.md),,--rebuild)
	$(PY) -m data.pool.precondition --toy data/toy/seed$* --runs data/toy/seed$* --gates warn
	@touch $@

test: $(venv) data/toy/images/ready
	$(PY) -m pytest

.venv/ready: requirements.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else "Python %d.%d is not supported: make PYTHON=python3.12 (3.11 to 3.13)" % v)'
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt pytest==9.2.0 ruff==0.17.6
	@touch $@

clean:
	rm -rf .venv $(RUNS) data/toy/images data/toy/worn.jsonl .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

.PHONY: toy replicate runs test clean
