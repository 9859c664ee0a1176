"""``python -m lowering.emulator run script.py [args]``: see `lowering.emulator.run_script`."""

import sys

from lowering.emulator.run_script import main

if __name__ == "__main__":
    sys.exit(main())
