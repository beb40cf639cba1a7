# Entresol: every task has a target here, and CI calls the same ones. `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help venv lint type test proto proto-check demo clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

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
