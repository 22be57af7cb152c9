"""`python -m eval.fleet`."""

import sys

from eval.fleet.run import main

if __name__ == "__main__":
    main(sys.argv[1:])
