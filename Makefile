# `make demo`, `make test` and `make mutate` set up .venv first, once.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check kernels mutate format clean

demo: .venv/.ready
	$(BIN)/posterity demo

# Two processes of one thread each take half as long as one of two threads: tensors are small.
test: check
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist loadfile
ifeq ($(shell uname -s),Linux)
	$(MAKE) kernels
endif

# On a CPU, in Triton's interpreter, which is asked for before Triton is imported; Triton is for Linux only.
kernels: .venv/.ready
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 tests/kernels

# Whether tests notice what they should: each of some wrong lines in turn (tests/mutation/sites.py).
mutate: .venv/.ready
	$(BIN)/python tests/mutation/run.py

check: .venv/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Pinned versions: a fresh machine gets the set that the tests passed with.
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	touch $@

clean:
	rm -rf .venv
