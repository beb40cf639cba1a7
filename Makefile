# Entresol: every task has a target here, and CI calls the same ones. `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.installed-run
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help apt venv lint type test proto proto-check demo bench clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# What a user needs: the distribution and its dependencies, all of them wheels. No compiler is needed; where there is
# one, native modules are built: what they do is faster.
$(RUN_STAMP): pyproject.toml setup.py $(wildcard */_*.[ch] */*/_*.[ch])
	@$(call HAS_VENV) || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && $(MAKE) apt; } || true
	@$(call HAS_VENV) || { echo "$(PYTHON) is not Python 3.10 or newer with its venv module. On Debian and Ubuntu, as" \
		"root: make apt. With another interpreter: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(STAMP): pyproject.toml $(RUN_STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

HAS_VENV = $(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null

apt: ## install python3 and its venv module from Debian's or Ubuntu's packages (as root; make demo does it itself then)
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3 python3-venv

# The generator has an environment of its own: its version is the oldest grpcio and protobuf that users may have.
PROTO_VENV ?= .venv-proto
PROTO_STAMP := $(PROTO_VENV)/.installed-1
PROTO_TOOLS := grpcio-tools==1.66.2 mypy-protobuf==3.6.0 'setuptools<80'
PROTO_FILES := $(wildcard common/proto/entresol/v1/*.proto)
# protoc OUT_DIRECTORY
PROTOC = $(PROTO_VENV)/bin/python -m grpc_tools.protoc -I. --plugin=protoc-gen-mypy=$(PROTO_VENV)/bin/protoc-gen-mypy \
	--plugin=protoc-gen-mypy_grpc=$(PROTO_VENV)/bin/protoc-gen-mypy_grpc \
	--python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PROTO_FILES)

$(PROTO_STAMP):
	$(PYTHON) -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/pip install --quiet --disable-pip-version-check $(PROTO_TOOLS)
	@touch $@

demo: $(RUN_STAMP) ## the main job end to end in the emulator; options in DEMO, as DEMO='--fabric emu-tcp --keep'
	$(BIN)/entresol-emu demo $(DEMO)

bench: $(RUN_STAMP) ## STORE, RETRIEVE and LOOKUP beside the machine's limits; options in BENCH, as BENCH=--quick
	$(BIN)/entresol-emu bench $(BENCH)

venv: $(STAMP) ## make the virtual environment

lint: $(STAMP) proto-check ## ruff (style, imports), import-linter (layers), generated code current
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

type: $(STAMP) ## mypy --strict
	$(BIN)/mypy

test: $(STAMP) ## every test that needs no hardware
	$(BIN)/pytest -q

proto: $(PROTO_STAMP) ## generate the protobuf code
	$(call PROTOC,.)

proto-check: $(PROTO_STAMP) ## fail where the checked-in protobuf code is not what `make proto` gives
	@set -e; out=$$(mktemp -d); trap 'rm -rf "$$out"' EXIT; $(call PROTOC,$$out); \
	for file in $$(cd $$out && find . -name '*_pb2*'); do \
		diff -u "$$file" "$$out/$$file" || { echo "$$file is stale: run 'make proto'" >&2; exit 1; }; done

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) $(PROTO_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
