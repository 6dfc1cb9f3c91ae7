"""``python -m services.dpu_gateway``: one gateway worker."""

from services.common.process import run_process
from services.dpu_gateway.settings import GatewaySettings
from services.dpu_gateway.worker import main

run_process(GatewaySettings, main)
