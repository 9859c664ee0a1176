"""`python -m kernels_dsl`: see `kernels_dsl.cli.main`."""

import sys

from kernels_dsl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
