"""`python -m eval.demo`."""

import sys

from eval.demo.run import main

if __name__ == "__main__":
    main(sys.argv[1:])
