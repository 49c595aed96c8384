"""`python -m jaxshard` is `jaxshard`; the console script begins here too."""

import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # While Python starts and imports, Ctrl-C ends it without a word; `main` says more as soon as it can.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from jaxshard.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
