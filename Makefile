# Two commands: `make demo` and `make test`. Both set up .venv first, once.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check format lock clean

demo: .venv/.ready
	$(BIN)/posterity demo

# Two processes of one thread each take half as long as one of two threads: tensors are small.
test: check
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist loadfile

check: .venv/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Every package by version and hash; then torch, which pip may find as a build for CPUs or for CUDA. Its file is
# fetched first, because pip would otherwise prefer a build whose hash its registry states. The last line
# brings the project, and for CUDA the libraries of NVIDIA, whose versions torch's own file states.
PIP := $(BIN)/pip --disable-pip-version-check --quiet
.venv/.ready: pyproject.toml requirements/test.txt requirements/torch.txt
	$(PYTHON) -m venv .venv
	$(PIP) install --require-hashes --no-deps --requirement requirements/test.txt
	$(PIP) download --no-deps --dest .venv/torch $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements/torch.txt)
	$(PIP) install --require-hashes --no-deps --no-index --find-links .venv/torch --requirement requirements/torch.txt
	rm -r .venv/torch
	$(PIP) install --no-build-isolation --editable '.[test]'
	touch $@

# After a change of the dependencies in pyproject.toml; OPTIONS=--upgrade takes the latest versions.
lock:
	$(PYTHON) requirements/lock.py $(OPTIONS)

clean:
	rm -rf .venv
