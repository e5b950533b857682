# Two commands do all the set-up: `make demo` runs the main job, `make test` passes the tests.
# PYTHON chooses the interpreter, VENV the environment, PIP_ARGS another torch build, DEVICE where the demo computes.

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
MACHINE ?= gpu
DEVICE ?= auto
PROCESSES ?= 1
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt
PYTEST := $(BIN)/python -m pytest
CI := 'ci and not gpu and not slow'
# Real processes get a second try on a machine that others use too, kernels don't (tests/conftest.py); each is reported.
SPREAD := -n 2 --reruns 1 -r Rs

.PHONY: help demo serve test browser perf-analyzer test-ci test-gpu test-large test-ray lint proto rules audit sbom soak fuzz drills bench bench-front bench-transport bench-gpu bench-gpus mutants verify-virtual predict clean

help: ## Say what each target does
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.light: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e .
	@touch $@

# Not compiled to bytecode beforehand: of 18,000 modules tests load some.
$(VENV)/.dev: $(VENV)/.light
	$(PIP) --no-compile -e '.[dev,torch,compiler]'
	@touch $@

demo: $(VENV)/.light ## Start the service, multiply matrices through it, check every result (no torch)
ifeq ($(DEVICE),virtual)
	@echo "DEVICE=virtual installs the kernel compiler (about 100 MB to download) and torch, and compiles three kernels."
	$(PIP) -e '.[torch,compiler]'
	GEMM_KERNELS=.kernels $(BIN)/python -m kernels build --arch sm_100a --only 'step9*kn_fp16_half'
endif
	GEMM_KERNELS=.kernels $(BIN)/python -m service.demo --device $(DEVICE)

serve: $(VENV)/.light ## Serve on http://127.0.0.1:8000
	$(BIN)/gemm-service serve

test: $(VENV)/.dev ## Run the tests (installs torch and the kernel compiler first)
	$(PYTEST) $(SPREAD) --durations 15

browser: ## Install Chromium, Prometheus, PostgreSQL and proxies, which tests run (Debian; needs root)
	@which chromium promtool prometheus haproxy >/dev/null || { apt-get update && \
		RUNLEVEL=1 apt-get install -y --no-install-recommends chromium prometheus fonts-dejavu-core postgresql haproxy nginx-light; }

# Linked with CUDA's runtime, which it doesn't need otherwise; of a version that older C libraries than 2.38 load.
perf-analyzer: $(VENV)/bin/python ## Install NVIDIA's perf_analyzer into .perf, which tests of /v2 run (Debian; needs root)
	@ldconfig -p | grep -q libb64 || { apt-get update && apt-get install -y --no-install-recommends libb64-0d; }
	@test -x .perf/bin/perf_analyzer || $(BIN)/python -m pip install --disable-pip-version-check --target .perf --no-deps tritonclient==2.48.0 nvidia-cuda-runtime-cu12==12.9.79

test-ci: $(VENV)/.dev lint browser perf-analyzer ## Run the wider set: clean install, property tests, API fuzzing, README commands
	$(PYTEST) -m $(CI) $(SPREAD) --timeout 600 --durations 25

test-gpu: $(VENV)/.dev ## Run the tests that need a GPU
	$(PYTEST) -m gpu --timeout 600

test-ray: $(VENV)/.dev ## Run the tests of Ray (Serve, sharded products) on a local cluster of three raylets (installs Ray)
	$(PIP) -e '.[ray]'
	$(PYTEST) -m slow --timeout 600 tests/service/test_ray_serve.py tests/service/test_team_ray.py

test-large: $(VENV)/.dev ## Bodies above 2 GiB, in and out (needs 12 GiB of memory)
	$(PYTEST) -m slow --timeout 600 tests/service/test_large.py

lint: $(VENV)/.dev ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

proto: $(VENV)/.dev ## Write the messages of gRPC again from service/inference/proto/inference.proto
	$(PIP) grpcio-tools
	cd service/inference/proto && $(abspath $(BIN))/python -m grpc_tools.protoc -I. --python_out=. inference.proto

rules: $(VENV)/.dev ## Write the Prometheus operator's rules again from deploy/prometheus
	$(BIN)/python -m tests.operator_rules

audit: $(VENV)/.dev ## Ask the advisory database (online) about every pinned version
	$(BIN)/pip-audit --strict --no-deps --disable-pip --progress-spinner off -s osv -r constraints.txt

sbom: $(VENV)/.dev ## Write sbom.json (CycloneDX): what is installed in VENV, with versions and licences
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o sbom.json $(BIN)/python

soak: $(VENV)/.dev ## 200,000 random requests against a real service (PROCESSES=number); writes benchmarks/results
	$(BIN)/python -m benchmarks.soak --processes $(PROCESSES)

fuzz: $(VENV)/.dev ## An hour of hostile bytes for what parses them, shared by PROCESSES; writes benchmarks/results
	$(BIN)/python -m benchmarks.fuzz --processes $(PROCESSES)

drills: $(VENV)/.dev ## Bring on what can go wrong, against real services, databases, stores; writes benchmarks/results
	$(BIN)/python -m benchmarks.drills

bench: $(VENV)/.dev ## Measure the service against its peers (needs wrk); writes benchmarks/results
	$(PIP) -e '.[bench]'
	$(BIN)/python -m benchmarks.serving

mutants: $(VENV)/.dev ## Break Steps 7, 8 and 9 on purpose on the virtual GPU; writes benchmarks/results
	$(BIN)/python -m kernels.virtual.mutants --jobs 2 --json benchmarks/results/cpu/mutants.json

verify-virtual: $(VENV)/.dev ## All kernels on the virtual GPU, 16 schedules; writes benchmarks/results
	$(BIN)/python -m kernels verify --device virtual --arch sm_100a --all --schedules 16 --jobs 2 --json benchmarks/results/cpu/virtual-sm100a.json
	$(BIN)/python -m kernels verify --device virtual --arch sm_90a --all --schedules 16 --jobs 2 --json benchmarks/results/cpu/virtual-sm90a.json

predict: $(VENV)/.dev ## What the model says of Steps 3 to 9 on B200 and H200; writes benchmarks/results
	$(BIN)/python -m kernels predict --chip b200 --write
	$(BIN)/python -m kernels predict --chip h200 --write

bench-front: $(VENV)/.dev ## What the front process carries and what bounds it (needs wrk); writes benchmarks/results
	$(PIP) -e '.[bench]'
	$(BIN)/python -m benchmarks.front

bench-transport: $(VENV)/.dev ## Measure the ways to hand over large operands, tritonclient's among them; writes benchmarks/results
	$(PIP) -e '.[bench]'
	$(BIN)/python -m benchmarks.transport

bench-gpu: ## Measure kernels, ladder and service on one GPU (MACHINE=name); writes benchmarks/results
	$(BIN)/python -m benchmarks.candidates --machine $(MACHINE)
	$(BIN)/python -m benchmarks.suite --all --profile --machine $(MACHINE)
	$(BIN)/python -m benchmarks.suite --dtype bf16 --machine $(MACHINE)
	$(BIN)/python -m benchmarks.suite --layouts --machine $(MACHINE)
	$(BIN)/python -m benchmarks.suite --rows --machine $(MACHINE)
	$(BIN)/python -m benchmarks.grouped --machine $(MACHINE)
	$(BIN)/python -m benchmarks.ladder --machine $(MACHINE)
	$(BIN)/python -m benchmarks.sanitizer --machine $(MACHINE)
	$(BIN)/python -m benchmarks.planted --racecheck --machine $(MACHINE)
	$(BIN)/python -m benchmarks.gpu_service --machine $(MACHINE)

bench-gpus: ## Measure all GPUs of this host together (MACHINE=name); writes benchmarks/results
	$(BIN)/python -m benchmarks.gpus --machine $(MACHINE)

clean: ## Remove what was installed and built here
	rm -rf $(VENV) .kernels .perf build dist *.egg-info
