"""`gemm-service` and `python -m service`: receives a command line, hands it to the command it names."""

import sys

from service.cli import main

if __name__ == "__main__":
    sys.exit(main())
