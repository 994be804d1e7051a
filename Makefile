# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_ARGS ?=
ENGINE ?= tiny
PYTEST_ARGS ?= -n 3 # most tests wait for a process or a time limit, not for a processor
STAMP := $(VENV)/.installed
VLLM := .venv-vllm

.PHONY: demo test test-vllm vllm check format lint types install schemas clean

install: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "OpenGyre needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(STAMP)

demo: install $(if $(filter vllm,$(ENGINE)),vllm)
	$(BIN)/gyre demo --engine $(ENGINE) $(DEMO_ARGS)

# One server of vLLM is shared by all of its tests, which workers beside each other would each start.
test: install
	$(BIN)/python -m pytest -m 'not vllm' $(PYTEST_ARGS)

# vLLM wants other versions than the services, so it has an environment of its own.
vllm: $(VLLM)/.installed

$(VLLM)/.installed: deploy/vllm/install.py deploy/vllm/constraints.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python deploy/vllm/install.py
	touch $@

test-vllm: install vllm
	$(BIN)/python -m pytest -m vllm tests/vllm

check: install format lint types test

format: install
	$(BIN)/ruff format --check .

lint: install
	$(BIN)/ruff check .

types: install
	$(BIN)/pyright

schemas: install
	$(BIN)/python -m opengyre.proto.generate

clean:
	rm -rf $(VENV) $(VLLM) .gyre runs
