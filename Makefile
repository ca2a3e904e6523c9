# make toy    the paper's problem on a laptop: prepare the toy world, run its arms, judge, print two tables
# make test   the tests
# make clean  remove what these two made
PYTHON ?= python3
ARMS ?= base grpo hintonly
RUNS ?= runs/toy
JOBS ?= 2  # arms at a time, each with one thread
PY := .venv/bin/python

# an arm's name -> its command; the run's folder is $(RUNS)/<arm>-s0
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
ALL = base grpo hintonly uft001 uft002 opd opd-annealed opd-gated reopd vapo vapohl stack

toy: data/toy/images/ready
	@$(MAKE) --no-print-directory -j$(JOBS) $(patsubst %,$(RUNS)/%-s0/outputs.jsonl,$(if $(filter all,$(ARMS)),$(ALL),$(ARMS)))
	$(PY) judge.py $(RUNS)/* --judge rule
	$(PY) analyze.py sparsity main --runs $(RUNS)

$(RUNS)/%-s0/outputs.jsonl:
	$(if $($*),,$(error there is no arm $*: choose from $(ALL)))
	@TQDM_POSITION=$(if $(filter base grpo,$*),0,1) $(PY) $($*) --toy --runs $(RUNS)

data/toy/images/ready: .venv/ready $(wildcard data/toy/*.jsonl)
	$(PY) -m data.toy.prepare
	@touch $@

test: .venv/ready data/toy/images/ready
	$(PY) -m pytest

.venv/ready: requirements.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else "Python %d.%d is not supported: make PYTHON=python3.12 (3.11 to 3.13)" % v)'
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt pytest==9.2.0 ruff==0.17.6
	@touch $@

clean:
	rm -rf .venv $(RUNS) data/toy/images .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

.PHONY: toy test clean
