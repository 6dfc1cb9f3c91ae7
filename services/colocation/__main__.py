"""``python -m services.colocation``: the operator."""

from services.colocation.operator import main
from services.colocation.settings import OperatorSettings
from services.common.process import run_process

run_process(OperatorSettings, main)
