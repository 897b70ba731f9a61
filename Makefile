# Needs make and Python 3.10-3.13, nothing else: each target makes the environment it runs in.
PYTHON ?= python3
JOBS ?= 2
OUT ?= outputs/demo

VENV := .venv
VENV4 := .venv-transformers4
VENV_EVAL := .venv-eval

.DEFAULT_GOAL := help
.PHONY: help demo test test-eval lint format clean python

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo "  Settings: PYTHON=python3.12 (which Python), JOBS=2 (test processes), OUT=$(OUT) (where the demo writes)"

demo: $(VENV)/.installed ## compose, inspect, train, evaluate, export and reload a small model, offline
	$(VENV)/bin/normalign demo --out $(OUT)

test: lint $(VENV)/.installed-extras $(VENV4)/.installed ## lint, all tests, then the marked subset with transformers 4.57
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile -m "not harness"
	$(VENV4)/bin/python -m pytest -n $(JOBS) --dist loadfile -m both_generations

test-eval: $(VENV_EVAL)/.installed ## the tests that need lmms-eval and lm-eval, in an environment of their own
	$(VENV_EVAL)/bin/python -m pytest -n $(JOBS) --dist loadfile -m harness

lint: $(VENV)/.installed ## check style without changing anything
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(VENV)/.installed ## fix style
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean: ## remove environments, caches, builds and outputs
	rm -rf $(VENV) $(VENV4) $(VENV_EVAL) build dist *.egg-info outputs .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed: constraints.txt
$(VENV4)/.installed: constraints-transformers4.txt
$(VENV_EVAL)/.installed: constraints-eval.txt
$(VENV)/.installed $(VENV4)/.installed: EXTRAS := dev
$(VENV_EVAL)/.installed: EXTRAS := dev,eval
$(VENV)/.installed $(VENV4)/.installed $(VENV_EVAL)/.installed: setup.cfg pyproject.toml
	@test -x $(@D)/bin/pip || $(MAKE) --no-print-directory python
	@test -x $(@D)/bin/pip || $(PYTHON) -m venv $(@D) || { rm -rf $(@D); \
		echo "$(PYTHON) has no working venv module; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(@D)/bin/pip install --quiet --constraint $(filter constraints%,$^) --editable ".[$(EXTRAS)]"
	@touch $@

# the optional packages that tests use, beside what the demo needs
$(VENV)/.installed-extras: $(VENV)/.installed
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --editable ".[dev,browser,deepspeed,log,quant,serve,space]"
	@touch $@

python:
	@command -v $(PYTHON) >/dev/null || { \
		echo "There is no $(PYTHON) here: install Python 3.10-3.13, or name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c "import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))" || { \
		echo "normalign needs Python 3.10-3.13, but $(PYTHON) is $$($(PYTHON) --version 2>&1); name another: make PYTHON=python3.12" >&2; exit 1; }
