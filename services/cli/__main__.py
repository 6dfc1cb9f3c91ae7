"""The ``blink`` script and ``python -m services.cli``: an interrupt while it imports ends it without a word."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, for example under nohup
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from services.cli.main import main

if __name__ == "__main__":
    main()
