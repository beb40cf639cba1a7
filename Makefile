# Entresol: every task has a target here, and CI calls the same ones. `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.installed-run
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.installed-bench

.DEFAULT_GOAL := help
.PHONY: help apt apt-bench bench-profile venv lint type test proto proto-check demo bench clean apt-peers bench-peers bench-latency bench-scale bench-large

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# What a user needs: the distribution and its dependencies, all of them wheels. No compiler is needed; where there is
# one, native modules are built that open large regions and serve requests faster.
NATIVE = $(wildcard */_*.[ch] */*/_*.[ch])
$(RUN_STAMP): pyproject.toml setup.py $(NATIVE)
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

bench: $(BENCH_STAMP) ## every operation beside the machine's limits, a report in bench-report/; options in BENCH, as BENCH=--quick
	$(BIN)/entresol-emu bench $(BENCH)

bench-scale: $(RUN_STAMP) ## one to eight workers, one to eight agents, a report in scale-report/; options in SCALE
	$(BIN)/entresol-emu bench-scale $(SCALE)

bench-large: $(RUN_STAMP) ## a region of 50 million slots, a report in scale-report/; options in LARGE, as LARGE=--quick
	$(BIN)/entresol-emu bench-large $(LARGE)

bench-latency: $(BENCH_STAMP) ## latency idle and beside stores, and the workers' pauses; options in BENCH, as BENCH=--quick
	$(BIN)/entresol-emu bench-latency $(BENCH)

bench-profile: $(BENCH_STAMP) ## where the time of each operation goes, on both sides; options in BENCH
	$(BIN)/entresol-emu bench-profile $(BENCH)

apt-bench: ## install fio and strace from Debian's or Ubuntu's packages (as root), for make bench and make bench-profile
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends fio strace

$(BENCH_STAMP): pyproject.toml $(RUN_STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[bench]'
	@touch $@

# Redis itself, and the libraries that Mooncake's wheel loads.
APT_PEERS := redis-server libibverbs1 librdmacm1 libnuma1 liburing2
HAS_PEERS = dpkg-query -W -f '$${Status}\n' $(APT_PEERS) 2>/dev/null | grep -c 'ok installed' | grep -qx $(words $(APT_PEERS))

bench-peers: $(RUN_STAMP) ## the same work on Redis, NIXL, Mooncake, LMCache; options in PEERS, as PEERS='--quick --only redis'
	@$(call HAS_PEERS) || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && $(MAKE) apt-peers; } || \
		echo "without all of '$(APT_PEERS)' (as root: make apt-peers): peers that need them are listed with their error" >&2
	$(BIN)/entresol-emu bench-peers $(PEERS)

apt-peers: ## install what the peers need from Debian's or Ubuntu's packages (as root; make bench-peers does it then)
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(APT_PEERS)

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
	rm -rf $(VENV) $(PROTO_VENV) .venv-peers .mypy_cache .ruff_cache .pytest_cache .hypothesis
