"""``python -m services.dpu_gateway``: one gateway worker."""

import os

# Set before numpy is imported: its BLAS, which a gateway never calls, starts a thread for each core of the node.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Read when grpc is imported: a stranger's failed TLS handshake is no line in the log.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from services.common.process import run_process
from services.dpu_gateway.settings import GatewaySettings
from services.dpu_gateway.worker import main

run_process(GatewaySettings, main)
