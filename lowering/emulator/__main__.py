"""``python -m lowering.emulator run script.py [args]``: see `lowering.emulator.front.run_script`."""

import sys

from lowering.emulator.front.run_script import main

if __name__ == "__main__":
    sys.exit(main())
