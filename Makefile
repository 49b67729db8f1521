# make run   set everything up and do the main job
# make test  set everything up and run the tests
# make check lint and types      make soak  the long tests      make lock  refresh requirements.lock
# make browser  Debian's Chromium, which the playground's tests drive (they are skipped without it)

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: run test check soak lock clean browser

run: $(READY)
	$(BIN)/gss quickstart

test: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not soak"

soak: $(READY)
	$(BIN)/python -m pytest -n auto -m soak

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $(READY)

# As root on Debian or Ubuntu; does nothing where there is a Chromium already.
browser:
	command -v chromium || { apt-get update -q && apt-get install -qy --no-install-recommends chromium fonts-dejavu-core; }

# The newest versions that pyproject.toml allows, torch held at its pin; local build tags are dropped, Linux-only ones marked.
lock:
	rm -rf .lock-venv && $(PYTHON) -m venv .lock-venv
	.lock-venv/bin/python -m pip install --quiet torch==2.13.0
	.lock-venv/bin/python -m pip install --quiet -e '.[dev]' torch==2.13.0
	(head -1 requirements.lock; .lock-venv/bin/python -m pip freeze --exclude-editable | sed "s/+cpu$$//; s/^triton==.*/&; sys_platform == 'linux'/") > requirements.lock.tmp
	mv requirements.lock.tmp requirements.lock && rm -rf .lock-venv

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
