"""`python -m jaxshard` is `jaxshard`."""

import sys

from jaxshard.commands.main import main

sys.exit(main())
