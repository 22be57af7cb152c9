"""`python -m eval.cache`."""

import sys

from eval.cache.run import main

if __name__ == "__main__":
    main(sys.argv[1:])
