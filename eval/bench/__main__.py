"""`python -m eval.bench`."""

import sys

from eval.bench.run import main

if __name__ == "__main__":
    main(sys.argv[1:])
