# Development tasks; CONTRIBUTING.md explains them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
LOCK   := requirements/cpu.lock
TORCH  := requirements/torch-cpu.lock
# Named after what it stands for, so that a changed lock or pyproject.toml makes `setup` run again.
STAMP  := $(VENV)/.setup-$(shell cat $(LOCK) $(TORCH) pyproject.toml | sha256sum | cut -c1-16)

export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1

.PHONY: setup lint format test slow demo clean

setup: $(STAMP)

# --no-deps: the lock is complete, and what pip would add to it (torchvision, torchaudio, torchcodec) breaks
# transformers beside a CPU build of torch.
$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than Python 3.11; run: make setup PYTHON=python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $(LOCK)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(BIN)/python -m vllm_tangram.embedded
	@rm -f $(VENV)/.setup-*
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: setup
	$(BIN)/python -m pytest -m "not slow"

slow: setup
	$(BIN)/python -m pytest -m slow

demo: setup
	$(BIN)/tangram demo

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
