# make lab   opens the course in JupyterLab        make test   runs all tests
# make demo  runs chapter 14 without a browser     make refresh   runs the notebooks whose saved outputs are stale
# make tiny  makes the embedded model again, from text to weights (hours)

PYTHON ?= python3
PY = .venv/bin/python

lab: .venv/ready
	$(PY) -m jupyter lab notebooks/14_mtp.ipynb

test: .venv/ready
	$(PY) -m pytest $(ARGS)

demo: .venv/ready
	$(PY) -m qwen_helpers.demo

refresh: .venv/ready
	$(PY) -m qwen_helpers.refresh $(ARGS)

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
	$(PY) -m pip install --constraint constraints.txt --editable '.[test]'
	@touch $@

.PHONY: lab test demo refresh tiny
