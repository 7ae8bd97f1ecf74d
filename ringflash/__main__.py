"""python -m ringflash."""

import sys

from ringflash.cli.main import main

sys.exit(main(sys.argv[1:]))
