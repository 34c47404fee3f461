"""python -m offload_connector.cli: the command line where its script is not on the PATH."""

import sys

from offload_connector.cli import main

if __name__ == "__main__":
    sys.exit(main())
