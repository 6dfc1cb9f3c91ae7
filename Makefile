# Two commands: `make run` serves a real model on this machine, `make test` checks everything.
VENV := .venv
BIN := $(VENV)/bin
ENGINE := cpu
SOURCES := $(shell find services proto -name '*.cpp' -o -name '*.hpp' -o -name '*.proto' -o -name CMakeLists.txt \
             -o -name schema.py -o -name codegen.py)
CPP := $(shell find services -name '*.cpp' -o -name '*.hpp' -o -name '*.cu' -o -name '*.cuh')

.PHONY: run test test-cluster test-node lint-chart checkov test-gpu verify-gpu prebuild-gpu soak-gpu sanitize-gpu test-rdma \
  test-rdma-pypi test-aarch64 qemu etcd node-packages install cuda lint types imports format lock clean model helm
.DELETE_ON_ERROR:

run: install model $(if $(filter cuda,$(ENGINE)),cuda)
	$(BIN)/blink up --engine $(ENGINE) --sample "Explain in two sentences why the sky is blue."

test: lint types imports model helm
	@command -v curl >/dev/null || { \
	  if command -v apt-get >/dev/null && test "$$(id -u)" = 0; then \
	    echo "blink's tests need one more package, installing: curl"; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes curl >/dev/null; \
	  else echo "blink's tests need one more package: apt-get install curl"; exit 1; fi; }
	$(BIN)/pytest

# On a machine with an NVIDIA GPU; what compares with transformers also needs torch and transformers in the venv.
test-gpu: install model cuda
	$(BIN)/pytest -m gpu -n 0 tests/gpu

# The same in some four minutes on 16 processors, with a summary in docs/gpu-verification.md.
verify-gpu: install model cuda
	$(BIN)/python -m bench.verify_gpu

# What both will ask the compiler for, on a machine without a GPU: carry build/cache to the one that has it.
prebuild-gpu: install cuda
	$(BIN)/python -m bench.prebuild build/cache/blink/kernels

# Ten minutes of random load on a GPU, then a look at everything that must be free again.
SECONDS := 600
soak-gpu: install cuda
	$(BIN)/python -m bench.soak --seconds $(SECONDS)

# compute-sanitizer, of a CUDA toolkit or of requirements/bench.txt, over a small model on a GPU.
sanitize-gpu: install cuda
	$(BIN)/python -m bench.sanitize

# In an emulated machine with soft-RoCE (docs/rdma.md): no RDMA hardware, no KVM and, once qemu is there, no root.
test-rdma: install qemu
	$(BIN)/pytest -m rdma -n 0 tests/rdma

# The same with PyPI's pyverbs and its rdma-core in place of Debian's, compiled once in a few minutes.
test-rdma-pypi: install qemu
	pyverbs=$$($(BIN)/python -m tests.rdma.vm.pypi) && BLINK_PYVERBS=$$pyverbs $(BIN)/pytest -m rdma -n 0 tests/rdma

qemu:
	@command -v qemu-system-x86_64 >/dev/null || { \
	  if command -v apt-get >/dev/null && test "$$(id -u)" = 0; then \
	    echo "blink needs one more package for this, installing: qemu-system-x86"; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	      apt-get install -qq --yes --no-install-recommends qemu-system-x86 >/dev/null; \
	  else echo "blink needs one more package for this: apt-get install qemu-system-x86"; exit 1; fi; }

# The gateway on an emulated Arm processor, as a DPU has them: with the wheels that it would install there, and its image.
test-aarch64: install model
	@for package in qemu-user-static g++-aarch64-linux-gnu buildah debootstrap; do \
	  dpkg-query --show $$package >/dev/null 2>&1 || { \
	    test "$$(id -u)" = 0 || { echo "blink needs one more package for this: apt-get install $$package"; exit 1; }; \
	    echo "blink needs one more package for this, installing: $$package"; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	      apt-get install -qq --yes --no-install-recommends $$package >/dev/null; }; done
	BLINK_AARCH64=1 $(BIN)/pytest -n 0 tests/aarch64

# On a real control plane on loopback (docs/kubernetes.md). Kubernetes is built once, then kept in the cache.
test-cluster: install etcd
	$(BIN)/pytest -m cluster -n 0 tests/cluster

etcd:
	@command -v etcd >/dev/null || { \
	  if command -v apt-get >/dev/null && test "$$(id -u)" = 0; then \
	    echo "blink needs one more package for this, installing: etcd-server"; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	      apt-get install -qq --yes --no-install-recommends etcd-server >/dev/null; \
	  else echo "blink needs one more package for this: apt-get install etcd-server"; exit 1; fi; }

# The chart on a node of its own, with containerd and kubelet, as root (docs/kubernetes.md). Images are built once.
NODE_PACKAGES := etcd-server iproute2 containerd runc containernetworking-plugins buildah debootstrap dnsmasq-base iptables conntrack
test-node: install model node-packages
	$(BIN)/pytest -m node -n 0 tests/cluster/node

node-packages:
	@test "$$(id -u)" = 0 || { echo "a node needs root"; exit 1; }
	@missing=; for package in $(NODE_PACKAGES); do dpkg-query --show $$package >/dev/null 2>&1 || missing="$$missing $$package"; done; \
	test -z "$$missing" || { echo "blink needs more packages for this, installing:$$missing"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	    apt-get install -qq --yes --no-install-recommends $$missing >/dev/null; }

# What the cuda engine needs beside NVIDIA's driver.
cuda: install
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements/cuda.txt

# checkov over every profile; in an environment of its own, as it asks for old versions of much.
CHECKOV := $(abspath build/checkov)
lint-chart: helm checkov
	@rm -rf build/chart && mkdir -p build/chart
	@helm=$$($(BIN)/python -m tests.cluster.fetch_helm); for profile in deploy/helm/blink/profiles/*.yaml; do \
	  $$helm template blink deploy/helm/blink --namespace serving --values $$profile \
	    --set tenants.namespace=batch,tenants.createNamespace=true,serviceMonitor.enabled=true \
	    > build/chart/$$(basename $$profile) || exit 1; done
	$(CHECKOV)/bin/checkov --config-file deploy/helm/checkov.yaml --directory build/chart

checkov:
	@test -x $(CHECKOV)/bin/checkov || { python3 -m venv $(CHECKOV) \
	  && $(CHECKOV)/bin/pip install --quiet --disable-pip-version-check checkov==3.3.30; }

# What tests of the chart render it with: in the cache, once.
helm: install
	@$(BIN)/python -m tests.cluster.fetch_helm >/dev/null

model: install
	$(BIN)/blink model pull smollm2-135m-instruct

install: $(VENV)/.built

# Debian splits venv, the headers and g++ from python3 and gcc. As root they are installed, as anybody else named.
$(VENV)/.packages: requirements/dev.txt
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  || { echo "blink needs Python 3.11 or newer as python3"; exit 1; }
	@missing=; \
	python3 -c 'import venv, ensurepip' 2>/dev/null || missing="$$missing python3-venv"; \
	python3 -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
	  || missing="$$missing python3-dev"; \
	command -v $(or $(CXX),c++) >/dev/null || missing="$$missing g++"; \
	test -n "$$missing" || exit 0; \
	if command -v apt-get >/dev/null && test "$$(id -u)" = 0; then \
	  echo "blink needs more packages, installing:$$missing"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes$$missing >/dev/null; \
	else echo "blink needs more packages: apt-get install$$missing"; exit 1; fi
	@echo "installing Python packages into $(VENV): about 1.5 minutes, 1.4 GB"
	python3 -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements/dev.txt
	@touch $@

$(VENV)/.built: $(VENV)/.packages pyproject.toml CMakeLists.txt $(SOURCES)
	@echo "compiling the C++ extensions: about 1.5 minutes the first time"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	@touch $@

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/buf lint

types: install
	$(BIN)/mypy

imports: install
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CPP)

# Needs uv. The lock files carry hashes of every wheel and no index address.
lock:
	for set in runtime operator dev build bench cuda; do \
	  uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
	    requirements/$$set.in -o requirements/$$set.txt || exit 1; done

clean:
	rm -rf $(VENV) build
