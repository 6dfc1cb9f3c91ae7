"""``python -m services.bootstrap``: loads the model, runs the engine, serves the handshake, parks."""

import os
import signal

from services.bootstrap.parking import SIGNALS

# Before any library starts a thread: threads inherit the mask, so every signal waits for the main thread's sigwait.
signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

# Before numpy is imported: its BLAS, which the engines never call, starts a thread for each core of the node.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from services.bootstrap.host import main  # noqa: E402
from services.bootstrap.settings import BootstrapSettings  # noqa: E402
from services.common.process import run_process  # noqa: E402

run_process(BootstrapSettings, main)
