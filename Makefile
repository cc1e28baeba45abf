# make test and make demo set everything up on a machine with Python and make; a second run installs nothing.

.PHONY: help demo test test-unit test-interpreter test-oldest test-oldest-compiled test-oldest-interpreted \
	test-compile test-gpu lint types docs figures golden records env clean
.DEFAULT_GOAL := help

# The first of these that has the venv module makes the environment; PYTHON=… overrides.
# Python 3.11 comes first because every pin has a wheel for it.
PYTHONS := $(or $(PYTHON),python3.11 python3.12 python3)
# The Python that may own a torch with a GPU, and then lends it to the environment.
GPU_PYTHON := $(or $(PYTHON),python3)
# Another index for torch's wheel, for instance the one of its CPU builds.
TORCH_INDEX ?=
JOBS := 2

VENV := .venv
PY := $(VENV)/bin/python
OLDEST := $(VENV)/triton-oldest
# Releases of Triton between the oldest and the newest: test-compile compiles a part with each.
BETWEEN := 3.7 3.8
# Of 13,000 modules a tenth is imported, and Python compiles a module when it is.
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# Some eighty processes import torch: the first one leaves its bytecode for the others.
unexport PYTHONDONTWRITEBYTECODE

# One process holds one Triton, and interprets or compiles. A folder without tests fails (pytest's status 5).
COMPILED := env -u TRITON_INTERPRET -u FLEXATTN_INTERPRET
INTERPRETED := env TRITON_INTERPRET=1 FLEXATTN_INTERPRET=1
# Tiny products of torch: with a thread for each core, each of JOBS processes waits for the others'.
PYTEST_ALONE := OMP_NUM_THREADS=1 $(PY) -m pytest -q --timeout 600
PYTEST := $(PYTEST_ALONE) -n $(JOBS) --dist worksteal
WITH_OLDEST := PYTHONPATH=$(OLDEST)
ANYWHERE := not gpu and not neuron and not full_autotune
NO_DEVICE := $(ANYWHERE) and not full_matrix and not long

help:
	@echo "make demo          the main job: on a GPU, or in the interpreter"
	@echo "make test          lint, types and every test that needs no GPU"
	@echo "make test-compile  configs of the default space, for every GPU, without one; long tests"
	@echo "make test-gpu      the tests that need a GPU"
	@echo "make lint types    ruff, codespell, plain English; mypy"
	@echo "make docs          the manual, as HTML in $(MANUAL); warnings are errors"
	@echo "make figures       figures of README and manual anew, from bench/results"
	@echo "make golden        accept the rendered kernels as the new goldens"
	@echo "make records       tune the presets on this GPU into $(RECORDS), at most $(SECONDS) s"
	@echo "make clean         remove the environment and what the tests left"

demo: env
	$(PY) -m flexattn demo

# The environment's two parts are made beside each other; then what is one process each runs side by side, the longest
# first and one more than JOBS: of three that take 50, 40 and 35 s, two would leave a core idle for the third.
test:
	$(MAKE) --jobs=$(JOBS) env
	$(MAKE) --jobs=$$(($(JOBS) + 1)) --output-sync=target test-oldest types lint
	$(MAKE) test-unit test-interpreter

# A process more than JOBS, for some of these tests wait: for children, locks and hearts.
test-unit: env
	$(COMPILED) $(PYTEST) -n $$(($(JOBS) + 1)) -m "$(NO_DEVICE)" tests/unit tests/golden tests/compile

test-interpreter: env
	$(INTERPRETED) $(PYTEST) -m "$(NO_DEVICE)" tests/interpreter

test-oldest: test-oldest-interpreted test-oldest-compiled

test-oldest-compiled: env
	$(WITH_OLDEST) $(COMPILED) $(PYTEST_ALONE) -m "oldest and (releases or not compile) and $(NO_DEVICE)" tests/unit/runtime tests/golden tests/compile

test-oldest-interpreted: env
	$(WITH_OLDEST) $(INTERPRETED) $(PYTEST_ALONE) -m "oldest and $(NO_DEVICE)" tests/interpreter

# Of what the newest Triton and the oldest both compile each takes a half, and of a space's configs
# some; with WHOLE=1 both compile all.
half = $(if $(WHOLE),,--half-matrix=$(1))

test-compile: env $(BETWEEN:%=$(VENV)/triton-%/.pins)
	$(COMPILED) $(PYTEST) -m "long and $(ANYWHERE)" tests/unit tests/compile
	$(INTERPRETED) $(PYTEST) -m "long and $(ANYWHERE)" tests/interpreter
	$(WITH_OLDEST) $(INTERPRETED) $(PYTEST) -m "oldest and long and $(ANYWHERE)" tests/interpreter
	$(COMPILED) $(PYTEST) $(call half,first) -m full_matrix tests/compile
	$(WITH_OLDEST) $(COMPILED) $(PYTEST) $(call half,second) -m "oldest and (full_matrix or not releases) and not gpu and not full_autotune" tests/compile
	for release in $(BETWEEN); do \
		PYTHONPATH=$(VENV)/triton-$$release $(COMPILED) $(PYTEST) -m "releases and $(NO_DEVICE)" tests/compile || exit 1; \
	done

test-gpu: env
	$(COMPILED) $(PY) -m pytest -q -m gpu tests/gpu

lint: env
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/codespell
	$(PY) -m tests.plain

# In one process with the package: its types are read once.
types: env
	$(PY) -m tests.blocks types

MANUAL := docs/_build/html

docs: env $(VENV)/.docs-pins
	$(COMPILED) $(PY) -m sphinx --builder html --fail-on-warning --keep-going --quiet docs $(MANUAL)

figures: env
	$(PY) -m bench.figures

golden: env
	$(COMPILED) $(PYTEST) --accept-golden tests/golden

# What most people run comes first: the time may end before the list does, and the next call goes on.
PRESETS := llama3-8b gpt-oss gemma3 qwen3 mistral-7b llama3-70b gemma2 serving all
RECORDS := configs/nvidia-h200
SECONDS := 480

records: env
	$(COMPILED) $(PY) -m flexattn tune $(addprefix --preset ,$(PRESETS)) --effort quick --time $(SECONDS) --prune --out $(RECORDS)

env: $(VENV)/.package $(OLDEST)/.pins

# A machine whose Python has a torch that sees a GPU keeps that torch and its Triton: a .pth file shows them
# to the environment, also where that Python is itself a virtual environment. Of 3.11's pip three quarters of its time
# went into choosing among what an index holds.
$(VENV)/.mode:
	@set -e; \
	site=$$($(GPU_PYTHON) -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)) if torch.cuda.is_available() else "")' 2>/dev/null) || site=; \
	python=; \
	for p in $${site:+$(GPU_PYTHON)} $(PYTHONS); do \
		if $$p -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$p; break; fi; \
	done; \
	test -n "$$python" || { echo "make: none of '$(PYTHONS)' is a Python 3.11 or newer with the venv module (Debian: apt-get install python3-venv); name one: make PYTHON=/path/to/python" >&2; exit 1; }; \
	echo "make: $(VENV) from $$python$${site:+, with the torch in $$site}"; \
	$$python -m venv --clear $(VENV); \
	$(PIP) $$(grep '^pip==' requirements/ci.txt) || echo "make: $(VENV) keeps the pip of $$python, which may be slow"; \
	if test -n "$$site"; then \
		echo "$$site" > "$$($(PY) -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/machine-torch.pth"; \
		echo machine > $@; \
	else echo pinned > $@; fi

# Triton goes in last and without its dependents' opinion: torch's GPU builds ask for one exact release.
$(VENV)/.pins: requirements/ci.txt $(VENV)/.mode
	@if grep -q machine $(VENV)/.mode; then skip='^(pip|torch|triton)=='; else skip='^(pip|triton)=='; fi; \
	grep -vE "$$skip" requirements/ci.txt > $(VENV)/pins.txt
	$(PIP) $(INDEX) -r $(VENV)/pins.txt
	@grep -q machine $(VENV)/.mode || { grep -E '^triton==' requirements/ci.txt > $(VENV)/triton.txt && $(PIP) --no-deps -r $(VENV)/triton.txt; }
	@touch $@

$(VENV)/.package: pyproject.toml $(VENV)/.pins
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.docs-pins: requirements/docs.txt $(VENV)/.pins
	$(PIP) --no-deps -r $<
	@touch $@

$(VENV)/triton-%/.pins: requirements/triton-%.txt $(VENV)/.mode
	rm -rf $(@D)
	$(PIP) --no-deps --target $(@D) -r $<
	@touch $@

clean:
	rm -rf $(VENV) build dist demo-out docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
