# make lab   opens the course in JupyterLab        make test   runs all tests, make quick the fast ones
# make demo  runs chapter 14 without a browser     make refresh   runs the notebooks whose saved outputs are stale
# make html  builds a web site of all chapters      make show   shows chapter 14's live pictures without their code
# make soak  tries the exactness tests on 10,000 cases each, make test-oldest runs all tests on the oldest packages
# make bench times the model at the real size against transformers, on random weights (several minutes, 10 GB of memory)
# make mutants makes small wrong changes in a copy, each of which a test must notice (ten minutes)
# make tiny  makes the embedded model again, from text to weights (hours)

PYTHON ?= python3
PY = .venv/bin/python

lab: .venv/ready
	$(PY) -m jupyter lab notebooks/14_mtp.ipynb $(ARGS)

# Brings Chromium where there is none. Where none can be had, browser tests are skipped; with ALL_TESTS=1 they fail.
test: .venv/ready
	@$(PY) tests/chromium.py
	$(PY) -m pytest $(ARGS)

# For work in progress: what is fast, and what belongs to the files that were changed since the last commit.
quick: .venv/ready
	$(PY) -m pytest --quick $(ARGS)

# CASES=500 tries fewer.
soak: .venv/ready
	$(PY) -m pytest --hypothesis-profile=soak --hypothesis-show-statistics tests/test_exact.py $(ARGS)

# Old packages warn about each other: only here may they.
test-oldest: .venv-oldest/ready
	@.venv-oldest/bin/python tests/chromium.py
	.venv-oldest/bin/python -m pytest -W default $(ARGS)

demo: .venv/ready
	$(PY) -m qwen_publish.demo

bench: .venv/ready
	$(PY) tests/bench/speed.py $(ARGS)

html: .venv/ready
	$(PY) -m qwen_publish.site $(ARGS)

show: .venv/ready
	JUPYTER_PATH=qwen_publish/pages $(PY) -m voila notebooks/show.ipynb --template=show \
		--VoilaConfiguration.extension_allowlist=@jupyter-widgets/jupyterlab-manager \
		--VoilaConfiguration.extension_allowlist=@voila-dashboards/widgets-manager8 $(ARGS)

mutants: .venv/ready
	$(PY) tests/mutants.py $(ARGS)

refresh: .venv/ready
	$(PY) -m qwen_publish.refresh $(ARGS)

tiny: .venv/ready
	$(PY) data/recipe/corpus.py --out build/corpus
	$(PY) data/recipe/tokenizer.py --corpus build/corpus --out data/tiny
	$(PY) data/recipe/train.py --corpus build/corpus --out build/train --model data/tiny
	$(PY) data/recipe/evaluate.py --corpus build/corpus --model data/tiny

# The set-up: done again only when the packages asked for have changed.
.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is %d.%d: name another with make PYTHON=/path/to/python3" % sys.version_info[:2])'
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "This Python makes no virtual environments: on Debian or Ubuntu, apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --constraint constraints.txt --editable '.[show,test]'
	@touch $@

.venv-oldest/ready: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --constraint constraints-oldest.txt --editable '.[show,test]'
	@touch $@

.PHONY: lab test quick mutants soak test-oldest bench demo html show refresh tiny
