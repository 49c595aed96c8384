"""`python -m jaxshard` is `jaxshard`."""

import sys

from jaxshard.cli import main

sys.exit(main())
